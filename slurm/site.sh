# Sourced by every batch script: sets up the environment of the cluster.
# Settings of a cluster are in slurm/sites/NAME.sh, NAME being ClusterName in the output of `scontrol show config`.

export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" # since Slurm 22.05 srun no longer inherits it from sbatch
export PYTHONUNBUFFERED=1                             # unbuffered log output

if [ -f "slurm/sites/${SLURM_CLUSTER_NAME:-}.sh" ]; then
  source "slurm/sites/$SLURM_CLUSTER_NAME.sh"
else
  source slurm/sites/local.sh
fi
