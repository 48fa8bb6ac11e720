package main_test

import (
	"slices"
	"strings"
	"testing"

	nvdevice "github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
)

// TestCDI creates a CDI specification of the driver root with NVIDIA's library,
// as the kubelet plugin does.
func TestCDI(t *testing.T) {
	if !ownProcess(t) {
		return
	}
	root := install(t, "2xh100-80gb")
	l := open(t, root)
	lib, err := nvcdi.New(
		nvcdi.WithDriverRoot(root),
		nvcdi.WithDevRoot(root),
		nvcdi.WithNvmlLib(l),
		nvcdi.WithDeviceLib(nvdevice.New(l)),
		nvcdi.WithMode(nvcdi.ModeNvml),
		nvcdi.WithNVIDIACDIHookPath("/usr/bin/nvidia-cdi-hook"),
		nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils),
	)
	if err != nil {
		t.Fatal(err)
	}
	common, err := lib.GetCommonEdits()
	if err != nil {
		t.Fatal(err)
	}
	var mounts, nodes, hooks []string
	for _, m := range common.Mounts {
		if m.HostPath != root+m.ContainerPath {
			t.Errorf("%s is mounted from %s", m.ContainerPath, m.HostPath)
		}
		mounts = append(mounts, m.ContainerPath)
	}
	for _, n := range common.DeviceNodes {
		nodes = append(nodes, n.Path)
	}
	for _, h := range common.Hooks {
		hooks = append(hooks, strings.Join(h.Args, " "))
	}
	for _, want := range []string{
		"/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04",
		"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04",
		"/usr/lib/x86_64-linux-gnu/libnvidia-ptxjitcompiler.so.580.159.04",
		"/usr/bin/nvidia-smi",
		"/usr/bin/nvidia-cuda-mps-control",
		"/usr/bin/nvidia-cuda-mps-server",
		"/lib/firmware/nvidia/580.159.04/gsp_nvmlsim.bin",
	} {
		if !slices.Contains(mounts, want) {
			t.Errorf("%s is not mounted; mounts %v", want, mounts)
		}
	}
	for _, want := range []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"} {
		if !slices.Contains(nodes, want) {
			t.Errorf("no node %s; nodes %v", want, nodes)
		}
	}
	t.Log(hooks)

	uuid, r := device(t, l, 1).GetUUID()
	ok(t, r)
	specs, err := lib.GetDeviceSpecsByID(uuid)
	if err != nil {
		t.Fatal(err)
	}
	if len(specs) != 1 {
		t.Fatalf("%d devices", len(specs))
	}
	var gpu []string
	for _, n := range specs[0].ContainerEdits.DeviceNodes {
		if n.HostPath != root+n.Path {
			t.Errorf("%s is %s on the host", n.Path, n.HostPath)
		}
		gpu = append(gpu, n.Path)
	}
	if !slices.Equal(gpu, []string{"/dev/nvidia1"}) {
		t.Errorf("nodes of GPU 1: %v", gpu)
	}
}
