#!/usr/bin/env bash
# Train on several nodes, and restart from the last checkpoint when a rank dies. Run the same command on each node:
#
#     launch/torchrun.sh HOST0 NODES DEVICES train.py [argument ...]
#
# The script calls Trainer(num_nodes=NODES, devices=DEVICES) and fit(..., ckpt_path=latest_checkpoint(folder)), with a folder
# that all nodes share. PORT, RUN_ID and MAX_RESTARTS are variables. Set LOCAL_ADDR to the
# address of a node whose name resolves to 127.0.0.1; otherwise the first node cannot detect that it is HOST0.
set -euo pipefail
if (($# < 4)); then
	sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
	exit 2
fi
host=$1 nodes=$2 devices=$3
shift 3
# Restarted ranks would read the addresses of dead ranks from a shared store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
place=()
if [[ -n ${LOCAL_ADDR:-} ]]; then
	[[ $LOCAL_ADDR == "$host" ]] && first=1 || first=0
	place=(--local_addr "$LOCAL_ADDR" --rdzv_conf "is_host=$first")
fi
exec torchrun --nnodes "$nodes" --nproc_per_node "$devices" --rdzv_backend c10d --rdzv_endpoint "$host:${PORT:-29500}" \
	--rdzv_id "${RUN_ID:-lightning-rl}" --max_restarts "${MAX_RESTARTS:-3}" \
	"${place[@]}" "$@"
