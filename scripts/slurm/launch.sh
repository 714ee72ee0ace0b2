# Read by the .sbatch files beside it, which set `experiment`. One optimizer, a job of the array for each seed:
#   sbatch scripts/slurm/figure_04.sbatch OPTIMIZER [NAME=VALUE ...]                     processes by torchrun, NCCL
#   LAUNCHER=mpirun sbatch scripts/slurm/figure_04.sbatch OPTIMIZER [NAME=VALUE ...]     processes by mpirun, the library's MPI exchange
# Submit it from the repository's root. A job that was ended goes on from its newest checkpoint when it is submitted again, or requeued.
# shellcheck shell=bash disable=SC2154 # experiment is set by the file that reads this one
if [ $# -lt 1 ]; then
    echo "$experiment: name the optimizer, e.g. sbatch scripts/slurm/$experiment.sbatch onebit_adam" >&2
    exit 2
fi
python=${PYTHON:-$SLURM_SUBMIT_DIR/.venv/bin/python}
export OMP_NUM_THREADS=1 PYTHONPATH="$SLURM_SUBMIT_DIR/src${PYTHONPATH:+:$PYTHONPATH}"
arguments=("experiment=$experiment" profile=paper "optimizer=$1" "seed=$SLURM_ARRAY_TASK_ID" resume=true progress=false "${@:2}")
cd "$SLURM_SUBMIT_DIR" || exit 2

case ${LAUNCHER:-torchrun} in
torchrun) # one on each node; they meet on the first
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    first=${hosts%%$'\n'*}
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit \
        "$python" -m torch.distributed.run --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$SLURM_NTASKS_PER_NODE" \
        --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:$((20000 + SLURM_JOB_ID % 10000))" \
        -m onebit.lab.train "${arguments[@]}" comm=nccl
    ;;
mpirun)
    mpirun -n "$((SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE))" "$python" -m onebit.lab.train "${arguments[@]}" comm=mpi
    ;;
*)
    echo "LAUNCHER is torchrun or mpirun, not $LAUNCHER" >&2
    exit 2
    ;;
esac
