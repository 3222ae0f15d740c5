# Sourced by every batch script: finds the Python of the job.
# conf/cluster/NAME.yaml describes a cluster. What its Python needs to start in plain `sbatch slurm/STAGE.sbatch`, beside an active .venv, is in
# slurm/sites/NAME.sh, NAME being ClusterName in the output of `scontrol show config`.
# PIPELINE_SLURM is the folder of this file, slurm/ in the working directory by default; PIPELINE_PYTHON is the interpreter, python by default.
# Commands outside of a checkout set them in the jobs that they render and print.

export PATH="${PATH:-/usr/local/bin:/usr/bin:/bin}" # sbatch --export=NONE can leave none
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" # since Slurm 22.05 srun no longer inherits it from sbatch
export PYTHONUNBUFFERED=1                             # unbuffered log output
if [ -n "${SLURM_MEM_PER_NODE:-}" ]; then unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU; fi # of the salloc that submitted this job: srun refuses both
# srun passes these limits on to the ranks: the store of rank 0 and gloo need a file for each rank they talk to (1,024 are usual), and RDMA locks the
# memory that it sends from.
ulimit -S -n "$(ulimit -H -n)"
ulimit -S -l "$(ulimit -H -l)"

if [ -f "slurm/sites/${SLURM_CLUSTER_NAME:-}.sh" ]; then
  source "slurm/sites/$SLURM_CLUSTER_NAME.sh"
elif [ -f "$PIPELINE_SLURM/sites/${SLURM_CLUSTER_NAME:-}.sh" ]; then
  source "$PIPELINE_SLURM/sites/$SLURM_CLUSTER_NAME.sh"
else
  source "$PIPELINE_SLURM/sites/local.sh"
fi

if ! "${PIPELINE_PYTHON:-python}" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("hydra"))' 2>/dev/null; then
  echo "site.sh: ${PIPELINE_PYTHON:-python} is not a Python with the packages of tools/install: activate its environment in cluster.setup or slurm/sites/NAME.sh" >&2
  exit 2
fi

# Runs a stage on all tasks of the job. The supervisor starts the ranks with srun; after a failure, or when the time ends, it starts them again or puts
# the job back into the queue. Its exit code, that of the ranks, is the exit code of the job. If it is killed itself, as by the host's out-of-memory
# killer, the job goes back to the queue here, unless that happens again and again at the start.
run_stage() {
  local told="" code=0 supervisor
  export SLURM_EXPORT_ENV=ALL # sbatch --export=NONE would also keep the environment from the ranks
  "${PIPELINE_PYTHON:-python}" -m pipeline.launch.supervisor "$@" &
  supervisor=$!
  trap 'told=1; kill -TERM "$supervisor" 2>/dev/null || true' TERM
  trap 'kill -USR1 "$supervisor" 2>/dev/null || true' USR1
  while :; do # a signal ends wait, and the supervisor goes on
    code=0
    wait "$supervisor" || code=$?
    kill -0 "$supervisor" 2>/dev/null || break
  done
  if [ "$code" = 137 ] && [ -z "$told" ] && { [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ] || [ "$SECONDS" -gt 600 ]; }; then
    echo "site.sh: the supervisor of the ranks was killed: job $SLURM_JOB_ID goes back to the queue" >&2
    if scontrol requeue "$SLURM_JOB_ID"; then sleep 300; fi # Slurm ends this script
  fi
  exit "$code"
}
