#!/usr/bin/env bash
# A training run on several nodes that begins anew from its last checkpoint when a rank dies. On each node, the same:
#
#     launch/torchrun.sh HOST0 NODES DEVICES train.py [argument ...]
#
# The script says Trainer(num_nodes=NODES, devices=DEVICES) and fit(..., ckpt_path=latest_checkpoint(folder)), with a folder
# that all nodes share. PORT, RUN_ID and MAX_RESTARTS are variables. Where the name of a node leads to 127.0.0.1, LOCAL_ADDR is
# its address: without it the first node does not know that it is HOST0.
set -euo pipefail
if (($# < 4)); then
	sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
	exit 2
fi
host=$1 nodes=$2 devices=$3
shift 3
# Without it ranks that start again read the addresses of those that died out of a store that both share.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
place=()
if [[ -n ${LOCAL_ADDR:-} ]]; then
	[[ $LOCAL_ADDR == "$host" ]] && first=1 || first=0
	place=(--local_addr "$LOCAL_ADDR" --rdzv_conf "is_host=$first")
fi
exec torchrun --nnodes "$nodes" --nproc_per_node "$devices" --rdzv_backend c10d --rdzv_endpoint "$host:${PORT:-29500}" \
	--rdzv_id "${RUN_ID:-lightning-rl}" --max_restarts "${MAX_RESTARTS:-3}" \
	"${place[@]}" "$@"
