"""What tests share: tiny policies, scripted servers, processes as ranks."""
