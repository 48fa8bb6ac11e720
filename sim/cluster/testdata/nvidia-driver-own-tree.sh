set -e
nvmlsim install --root=/run/nvidia/driver --machine=/run/localcluster/config/nvidia-machine.yaml --node-name=n --libraries=usr/lib64
if [ ! -e /run/nvidia-driver-loaded ]; then
  nvmlsim reboot --root=/run/nvidia/driver
fi
mkdir -p /etc/ld.so.conf.d
echo /run/nvidia/driver/usr/lib64 > /etc/ld.so.conf.d/nvidia.conf
ldconfig
touch /run/nvidia-driver-loaded
exec nvmlsim serve --root=/run/nvidia/driver --machine=/run/localcluster/config/nvidia-machine.yaml --node-name=n --libraries=usr/lib64
