package nvmltest

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// betweenSamples is more than the least time between two samples of performance counters.
const betweenSamples = 200 * time.Millisecond

// PartitionUsage checks the usage that the port reports of a GPU in MIG mode: the memory of
// each MIG device and its processes, no utilization of processes and, if counters is true,
// that of MIG devices since the previous reading. It runs in a bubble of synctest.
func PartitionUsage(t *testing.T, machine *nvmlsim.Machine, counters bool) {
	s := OpenSimulated(machine)
	gpus, err := s.GPUs()
	must(t, err)
	profile := gpus[0].MIG.Profiles[0]
	var made []gpu.Instance
	for _, at := range profile.Placements[:2] {
		i, err := s.CreateInstance(gpu.Partition{GPU: gpus[0].UUID, Profile: profile.Name, Placement: at})
		must(t, err)
		made = append(made, i)
	}
	const used = 100 << 20
	must(t, s.Machine.AddProcess(0, nvmlsim.Process{
		PID: 74, UsedMemory: used, Utilization: 50, MPSClient: true,
		GPUInstance: uint32(made[0].GPUInstanceID), ComputeInstance: uint32(made[0].ComputeInstanceID),
	}))
	check := func(when string, over time.Duration, busy, idle *float64) {
		t.Helper()
		got, err := s.Usage(gpus[0].UUID, over)
		must(t, err)
		if !counters {
			busy, idle = nil, nil
		}
		want := gpu.Usage{
			Memory: gpu.MemoryUsage{Total: gpus[0].MemoryBytes, Used: used},
			Processes: []gpu.Process{{
				PID: 74, MemoryBytes: new(int64(used)), MPSClient: true,
				GPUInstanceID: &made[0].GPUInstanceID, ComputeInstanceID: &made[0].ComputeInstanceID,
			}},
			Partitions: []gpu.PartitionUsage{
				{UUID: made[0].UUID, GPUInstanceID: made[0].GPUInstanceID, Memory: gpu.MemoryUsage{Total: profile.MemoryBytes, Used: used}, Utilization: busy},
				{UUID: made[1].UUID, GPUInstanceID: made[1].GPUInstanceID, Memory: gpu.MemoryUsage{Total: profile.MemoryBytes}, Utilization: idle},
			},
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("usage in MIG mode, %s (-want +got):\n%s", when, diff)
		}
	}
	check("first reading", usageOver, nil, nil)
	check("too soon after it", usageOver, nil, nil)
	time.Sleep(usageOver)
	check("next reading", usageOver, new(0.5), new(0.0))
	time.Sleep(time.Hour)
	check("after a pause", usageOver, nil, nil)
	time.Sleep(usageOver)
	must(t, s.DestroyInstance(gpus[0].UUID, made[1]))
	made[1], err = s.CreateInstance(gpu.Partition{GPU: gpus[0].UUID, Profile: profile.Name, Placement: made[1].Placement})
	must(t, err)
	check("another instance with the same ID", usageOver, new(0.5), nil)
	time.Sleep(usageOver)
	must(t, s.Machine.Fault(nvmlsim.Fault{Call: "GpmMigSampleGet", GPU: 0, Code: nvmlsim.Unknown}))
	check("the driver doesn't tell", usageOver, nil, nil)
	if counters {
		for _, call := range []string{"GpmQueryDeviceSupport", "GpmMigSampleGet", "GpmMetricsGet"} {
			must(t, s.Machine.Fault(nvmlsim.Fault{Call: call, GPU: 0, Code: nvmlsim.GPUIsLost}))
			_, err := s.Usage(gpus[0].UUID, usageOver)
			want(t, "usage of a GPU that is lost at "+call, err, nvml.ErrLost)
			must(t, s.Machine.ClearFaults())
		}
	}
	must(t, s.Machine.ClearFaults())
	createWhileRead(t, s, gpu.Partition{GPU: gpus[0].UUID, Profile: profile.Name, Placement: profile.Placements[2]})
	check("after an instance that wasn't completed", usageOver, nil, nil)
	s.EndUsage(gpus[0].UUID)
	if n := s.Machine.GPMSamples(); n != 0 {
		t.Errorf("%d samples are allocated after the end of readings", n)
	}
	time.Sleep(usageOver)
	check("readings begin again", usageOver, nil, nil)
	must(t, s.DestroyInstance(gpus[0].UUID, made[1]))
	must(t, s.Close())
	if n := s.Machine.GPMSamples(); n != 0 {
		t.Errorf("%d samples are allocated after the end of the session", n)
	}
}

// createWhileRead makes the creation of an instance fail at its last call, and reads the usage
// of its GPU meanwhile. The reading must not see the instance, of which nothing must be left.
func createWhileRead(t *testing.T, s *Simulated, p gpu.Partition) {
	t.Helper()
	must(t, s.Machine.Fault(nvmlsim.Fault{Call: "DeviceGetMigDeviceHandleByIndex", GPU: 0, Code: nvmlsim.Unknown, DelayMS: 1000, Count: 1}))
	created := make(chan error)
	go func() {
		_, err := s.CreateInstance(p)
		created <- err
	}()
	synctest.Wait() // until the creation has reached the call that is delayed
	u, err := s.Usage(p.GPU, usageOver)
	must(t, err)
	if len(u.Partitions) != 2 {
		t.Errorf("usage of %d partitions, want 2, without the one that was being created", len(u.Partitions))
	}
	if err := <-created; err == nil || errors.Is(err, nvml.ErrInUse) {
		t.Errorf("got %v, want the driver's error alone", err)
	}
	m, err := s.MIG(p.GPU)
	must(t, err)
	if len(m.Instances) != 2 {
		t.Errorf("instances: %v, want 2", m.Instances)
	}
}

// PerformanceCounters checks of an initialized library what the port expects of samples of
// performance counters (GPM), on whole GPUs: so a real GPU without MIG mode shows it too.
func PerformanceCounters(t *testing.T, lib gonvml.Interface) {
	count, ret := lib.DeviceGetCount()
	code0(t, "nvmlDeviceGetCount", ret)
	for i := range count {
		device, ret := lib.DeviceGetHandleByIndex(i)
		code0(t, "nvmlDeviceGetHandleByIndex", ret)
		support, ret := device.GpmQueryDeviceSupport()
		code0(t, "nvmlGpmQueryDeviceSupport", ret)
		architecture, ret := device.GetArchitecture()
		code0(t, "nvmlDeviceGetArchitecture", ret)
		if supported := support.IsSupportedDevice != 0; supported != (architecture >= gonvml.DEVICE_ARCH_HOPPER) {
			t.Errorf("GPU %d of architecture %d: performance counters: %t", i, architecture, supported)
		}
		sampleGPU(t, lib, device, support.IsSupportedDevice != 0)
	}
}

func sampleGPU(t *testing.T, lib gonvml.Interface, device gonvml.Device, supported bool) {
	var samples [2]gonvml.GpmSample
	for i := range samples {
		var ret gonvml.Return
		samples[i], ret = lib.GpmSampleAlloc()
		code0(t, "nvmlGpmSampleAlloc", ret)
		defer func() { code0(t, "nvmlGpmSampleFree", samples[i].Free()) }()
	}
	if ret := samples[0].MigGet(device, 0); ret == gonvml.SUCCESS || supported && ret != gonvml.ERROR_INVALID_ARGUMENT {
		t.Errorf("sample of a GPU instance with MIG mode off: %v", ret)
	}
	if ret := samples[0].Get(device); (ret == gonvml.SUCCESS) != supported {
		t.Errorf("sample, where performance counters are supported: %t: %v", supported, ret)
	}
	if !supported {
		return
	}
	code0(t, "nvmlGpmSampleGet", samples[1].Get(device))
	metrics := func(first, second gonvml.GpmSample) (gonvml.GpmMetricsGetType, gonvml.Return) {
		get := gonvml.GpmMetricsGetType{NumMetrics: 2, Sample1: first, Sample2: second}
		get.Metrics[0].MetricId, get.Metrics[1].MetricId = uint32(gonvml.GPM_METRIC_GRAPHICS_UTIL), uint32(gonvml.GPM_METRIC_SM_UTIL)
		ret := lib.GpmMetricsGet(&get)
		return get, ret
	}
	get, ret := metrics(samples[0], samples[1])
	t.Logf("two samples at once: %v, %v %%", ret, get.Metrics[0].Value)
	time.Sleep(betweenSamples)
	code0(t, "nvmlGpmSampleGet", samples[1].Get(device))
	get, ret = metrics(samples[0], samples[1])
	code0(t, "nvmlGpmMetricsGet", ret)
	for _, m := range get.Metrics[:2] {
		if ret := gonvml.Return(m.NvmlReturn); ret != gonvml.SUCCESS || m.Value < 0 || m.Value > 100 {
			t.Errorf("metric %d: %v, %v; want a percentage", m.MetricId, ret, m.Value)
		}
	}
}

// code0 fails the test unless a call has succeeded.
func code0(t *testing.T, call string, ret gonvml.Return) {
	t.Helper()
	if ret != gonvml.SUCCESS {
		t.Fatalf("%s: %v", call, ret)
	}
}
