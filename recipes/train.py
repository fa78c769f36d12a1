"""LightningCLI for configurations such as those in ``recipes/yaml``.

python recipes/train.py fit --config recipes/yaml/dapo.yaml
python recipes/train.py fit --config recipes/yaml/dapo.yaml --model.group_size 16
python recipes/train.py fit --print_config
"""

from lightning.pytorch.cli import LightningCLI

from lightning_rl import PromptDataModule, RLLightningModule

if __name__ == "__main__":
    LightningCLI(RLLightningModule, PromptDataModule)
