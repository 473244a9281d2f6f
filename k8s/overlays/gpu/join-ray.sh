# Makes this pod a node of the Ray cluster, waits for the GPUs, and becomes `specwire "$@"`. The first pod of a
# LeaderWorkerSet is the cluster's head, with GPUs of its own: RAY_NUM_GPUS.
# Until then it is the pod's first process, which receives only signals that it traps.
set -eu
trap 'exit 143' TERM

start() { # 80 MB is the smallest object store that Ray accepts; nothing is stored in it
    ray start "$@" --num-cpus=0 --object-store-memory=80000000
}

if [ "${LWS_WORKER_INDEX:-}" = 0 ]; then
    start --head --port=6379 --node-manager-port=6380 --include-dashboard=false --num-gpus="$RAY_NUM_GPUS"
else
    until ray health-check --address "$SPECWIRE_RAY_ADDRESS"; do sleep 2; done
    start --address="$SPECWIRE_RAY_ADDRESS" --num-gpus=0
fi

python - <<'WAIT'
import os
import time

import ray

ray.init(address=os.environ["SPECWIRE_RAY_ADDRESS"], log_to_driver=False, logging_level="error")
resource = os.environ["SPECWIRE_DEVICE"].replace("cuda", "gpu").upper()
wanted = int(os.environ["SPECWIRE_TENSOR_PARALLEL_SIZE"])
while (found := ray.cluster_resources().get(resource, 0)) < wanted:
    print(f"waiting for {wanted} {resource}s: the Ray cluster has {found:g}", flush=True)
    time.sleep(5)
WAIT

exec specwire "$@"
