set -e
mount -o remount,bind,rw /
nvmlsim install --root=/home/kubernetes/bin/nvidia --machine=2xh100-80gb --node-name=n --libraries=lib64 --programs=bin --kernel=/
if [ ! -e /run/nvidia-driver-loaded ]; then
  nvmlsim reboot --root=/home/kubernetes/bin/nvidia
fi
touch /run/nvidia-driver-loaded
exec nvmlsim serve --root=/home/kubernetes/bin/nvidia --machine=2xh100-80gb --node-name=n --libraries=lib64 --programs=bin --kernel=/
