# Sourced by every batch script: the environment of the cluster that the job runs on.
# A cluster's own settings are slurm/sites/NAME.sh, NAME being what `scontrol show config` calls ClusterName.

export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" # since Slurm 22.05 srun no longer takes it over from sbatch
export PYTHONUNBUFFERED=1                             # log lines leave when they are written

if [ -f "slurm/sites/${SLURM_CLUSTER_NAME:-}.sh" ]; then
  source "slurm/sites/$SLURM_CLUSTER_NAME.sh"
else
  source slurm/sites/local.sh
fi
