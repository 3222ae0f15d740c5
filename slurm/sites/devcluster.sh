# tools/devcluster: four nodes that are one machine.
source slurm/sites/local.sh
export GLOO_SOCKET_IFNAME=lo
