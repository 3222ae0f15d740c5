# tools/devcluster: four Slurm nodes on one machine.
source slurm/sites/local.sh
export GLOO_SOCKET_IFNAME=lo
