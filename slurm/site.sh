# Sourced by every batch script: sets up the environment of the cluster.
# Settings of a cluster are in slurm/sites/NAME.sh, NAME being ClusterName in the output of `scontrol show config`.
# PIPELINE_SLURM is the folder of this file, slurm/ in the working directory by default; PIPELINE_PYTHON is the interpreter, python by default.
# Commands outside of a checkout set them in the jobs that they render and print.

export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" # since Slurm 22.05 srun no longer inherits it from sbatch
export PYTHONUNBUFFERED=1                             # unbuffered log output

if [ -f "slurm/sites/${SLURM_CLUSTER_NAME:-}.sh" ]; then
  source "slurm/sites/$SLURM_CLUSTER_NAME.sh"
elif [ -f "$PIPELINE_SLURM/sites/${SLURM_CLUSTER_NAME:-}.sh" ]; then
  source "$PIPELINE_SLURM/sites/$SLURM_CLUSTER_NAME.sh"
else
  source "$PIPELINE_SLURM/sites/local.sh"
fi

# Runs a stage on all tasks of the job. A run that stopped because its time ends (exit code 75) is requeued under the same job id.
# srun reports the tasks that it killed after the first failure; the exit code of the job is that of rank 0, which runs on this node.
run_stage() {
  local code=0
  PIPELINE_EXIT_CODE=$(mktemp)
  export PIPELINE_EXIT_CODE
  srun --kill-on-bad-exit=1 "${PIPELINE_PYTHON:-python}" -m pipeline "$@" || code=$?
  [ "$code" = 0 ] || code=$(grep . "$PIPELINE_EXIT_CODE" || echo "$code")
  rm -f "$PIPELINE_EXIT_CODE"
  if [ "$code" = 75 ]; then
    echo "requeueing job $SLURM_JOB_ID" >&2
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60 # Slurm ends this script
  fi
  return "$code"
}
