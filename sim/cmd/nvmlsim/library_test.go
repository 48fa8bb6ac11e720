package main_test

import (
	"bufio"
	"bytes"
	"context"
	"debug/buildinfo"
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/dl"
	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
)

func library(root string) string {
	return filepath.Join(root, "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1")
}

// declared returns the functions in nvml.h of the pinned go-nvml: prototypes
// and the old names that are macros.
func declared(t *testing.T) []string {
	t.Helper()
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml").Output()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "pkg/nvml/nvml.h"))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, m := range regexp.MustCompile(`DECLDIR[ \t]+(?:char\*[ \t]*)?(nvml\w+)[ \t]*\(`).FindAllSubmatch(text, -1) {
		names = append(names, string(m[1]))
	}
	if len(names) < 427 {
		t.Fatalf("found only %d prototypes in nvml.h", len(names))
	}
	for _, m := range regexp.MustCompile(`(?m)^\s*#define\s+(nvml(?:Device|Event|Get|Init|Compute|Vgpu)\w*[a-z])\s+(nvml\w+)\s*$`).FindAllSubmatch(text, -1) {
		if slices.Contains(names, string(m[2])) {
			names = append(names, string(m[1]))
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func TestLibraryExportsAllOfNVML(t *testing.T) {
	f, err := elf.Open(library(install(t, "l4")))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	symbols, err := f.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	exported := map[string]bool{}
	for _, s := range symbols {
		exported[s.Name] = s.Section != elf.SHN_UNDEF
	}
	for _, name := range declared(t) {
		if !exported[name] {
			t.Errorf("%s is not exported", name)
		}
	}
	if names, err := f.DynString(elf.DT_SONAME); err != nil || !slices.Equal(names, []string{"libnvidia-ml.so.1"}) {
		t.Errorf("soname %v, %v", names, err)
	}
}

// Go doesn't support a second Go runtime in a process, so the library contains
// no Go code and needs only the C library.
func TestLibraryHasNoGo(t *testing.T) {
	path := library(install(t, "l4"))
	if info, err := buildinfo.ReadFile(path); err == nil {
		t.Errorf("it was built by %s", info.GoVersion)
	}
	f, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, s := range f.Sections {
		if strings.Contains(s.Name, "go.buildinfo") || strings.Contains(s.Name, "gopclntab") || strings.Contains(s.Name, "go.build") {
			t.Errorf("section %s", s.Name)
		}
	}
	symbols, err := f.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range symbols {
		if defined := s.Section != elf.SHN_UNDEF; defined && !strings.HasPrefix(s.Name, "nvml") || strings.Contains(s.Name, "cgo") || strings.HasPrefix(s.Name, "pthread_create") {
			t.Errorf("symbol %s", s.Name)
		}
	}
	needed, err := f.ImportedLibraries()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range needed {
		if !slices.Contains([]string{"libc.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}, name) {
			t.Errorf("it needs %s", name)
		}
	}
}

// compile builds a program of testdata.
func compile(t *testing.T, name, dir string) string {
	t.Helper()
	program := filepath.Join(dir, name)
	if out, err := exec.Command("cc", "-o", program, "testdata/"+name+".c", "-ldl", "-pthread").CombinedOutput(); err != nil {
		t.Fatalf("cc: %v\n%s", err, out)
	}
	return program
}

// TestNoCallCrashes calls all functions with null pointers. Functions that
// aren't simulated must answer NOT_SUPPORTED, the others must return an error.
func TestNoCallCrashes(t *testing.T) {
	root := install(t, "l4")
	program := compile(t, "call_all", t.TempDir())
	names := slices.DeleteFunc(declared(t), func(n string) bool {
		return n == "nvmlErrorString" || n == "nvmlShutdown" || strings.HasPrefix(n, "nvmlInit")
	})
	c := exec.Command(program, library(root))
	c.Stdin = strings.NewReader(strings.Join(names, "\n") + "\n")
	out, err := c.Output()
	if err != nil {
		t.Fatalf("%v after\n%s", err, out)
	}
	answers := map[string]int{}
	lines := bufio.NewScanner(bytes.NewReader(out))
	for lines.Scan() {
		_, code, _ := strings.Cut(lines.Text(), " ")
		answers[code]++
	}
	if answers["3"] < 300 || answers["2"] < 60 || answers["3"]+answers["2"] != len(names) {
		t.Errorf("answers %v of %d calls; want Not Supported or Invalid Argument only", answers, len(names))
	}
}

// ownProcess runs the rest of a test in a separate process, and reports whether
// it was called in that process: a process binds NVML's functions once, to the
// first library that it loads.
func ownProcess(t *testing.T) bool {
	t.Helper()
	if os.Getenv(ownProcessEnv) != "" {
		return true
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // a hung process must not outlive the test
	defer cancel()
	c := exec.CommandContext(ctx, os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.v")
	c.Env = append(os.Environ(), ownProcessEnv+"="+binaries.dir)
	out, err := c.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("--- PASS: "+t.Name())) {
		t.Errorf("%v\n%s", err, out)
	}
	return false
}

// open loads the library as production programs do.
func open(t *testing.T, root string) nvml.Interface {
	t.Helper()
	l := nvml.New(nvml.WithLibraryPath(library(root)))
	if r := l.Init(); r != nvml.SUCCESS {
		t.Fatal(r)
	}
	t.Cleanup(func() {
		if r := l.Shutdown(); r != nvml.SUCCESS {
			t.Error(r)
		}
	})
	return l
}

func ok(t *testing.T, r nvml.Return) {
	t.Helper()
	if r != nvml.SUCCESS {
		t.Fatal(r)
	}
}

func device(t *testing.T, l nvml.Interface, i int) nvml.Device {
	t.Helper()
	d, r := l.DeviceGetHandleByIndex(i)
	ok(t, r)
	return d
}

// checkCUDAVersion checks that NVML knows the CUDA version only while the
// loader finds libcuda.
func checkCUDAVersion(t *testing.T, l nvml.Interface, root string) {
	t.Helper()
	if _, r := l.SystemGetCudaDriverVersion(); r != nvml.ERROR_NOT_FOUND {
		t.Errorf("CUDA version without libcuda: %v", r)
	}
	cuda := dl.New(filepath.Join(root, "usr/lib/x86_64-linux-gnu/libcuda.so.1"), dl.RTLD_LAZY)
	if err := cuda.Open(); err != nil {
		t.Fatal(err)
	}
	if v, r := l.SystemGetCudaDriverVersion(); r != nvml.SUCCESS || v != 13000 {
		t.Errorf("CUDA %d, %v", v, r)
	}
}

// TestLibraryByGoNVML uses the real client library: its results must agree with
// nvidia-smi, which uses the engine in process.
func TestLibraryByGoNVML(t *testing.T) {
	if !ownProcess(t) {
		return
	}
	root := install(t, "8xh100-80gb,1xt4")
	l := open(t, root)
	n, r := l.DeviceGetCount()
	ok(t, r)
	var got strings.Builder
	for i := range n {
		d := device(t, l, i)
		uuid, r := d.GetUUID()
		ok(t, r)
		name, r := d.GetName()
		ok(t, r)
		pci, r := d.GetPciInfo()
		ok(t, r)
		serial, r := d.GetSerial()
		ok(t, r)
		mem, r := d.GetMemoryInfo_v2()
		ok(t, r)
		bus := string(bytes.TrimRight(asBytes(pci.BusId[:]), "\x00"))
		by, r := l.DeviceGetHandleByUUID(uuid)
		ok(t, r)
		minor, r := by.GetMinorNumber()
		ok(t, r)
		if byBus, r := l.DeviceGetHandleByPciBusId(bus); r != nvml.SUCCESS || byBus != by {
			t.Errorf("by bus id %s: %v", bus, r)
		}
		version, r := l.SystemGetDriverVersion()
		ok(t, r)
		got.WriteString(strings.Join([]string{itoa(minor), name, uuid, serial, bus, itoa(int(mem.Total >> 20)), version}, ", ") + "\n")
	}
	want := smi(t, root, "--query-gpu=index,name,uuid,serial,pci.bus_id,memory.total,driver_version", "--format=csv,noheader,nounits")
	if diff := cmp.Diff(want, got.String()); diff != "" {
		t.Errorf("(-nvidia-smi +library):\n%s", diff)
	}
	checkCUDAVersion(t, l, root)
	if s := l.ErrorString(nvml.ERROR_GPU_IS_LOST); s != "GPU is lost" {
		t.Errorf("error string %q", s)
	}
}

func asBytes[T int8 | uint8](in []T) []byte {
	out := make([]byte, len(in))
	for i, c := range in {
		out[i] = byte(c)
	}
	return out
}

func itoa(i int) string { return string(appendInt(nil, i)) }

func appendInt(b []byte, i int) []byte {
	if i >= 10 {
		b = appendInt(b, i/10)
	}
	return append(b, byte('0'+i%10))
}

func TestLibraryProfilesAndModes(t *testing.T) {
	if !ownProcess(t) {
		return
	}
	l := open(t, install(t, "1xh200,1xl4"))
	h200, l4 := device(t, l, 0), device(t, l, 1)
	v1, r := h200.GetGpuInstanceProfileInfo(nvml.GPU_INSTANCE_PROFILE_3_SLICE)
	ok(t, r)
	v2, r := h200.GetGpuInstanceProfileInfoV(nvml.GPU_INSTANCE_PROFILE_3_SLICE).V2()
	ok(t, r)
	v3, r := h200.GetGpuInstanceProfileInfoV(nvml.GPU_INSTANCE_PROFILE_3_SLICE).V3()
	ok(t, r)
	want := nvml.GpuInstanceProfileInfo{Id: 9, SliceCount: 3, InstanceCount: 2, MultiprocessorCount: 60, CopyEngineCount: 3, DecoderCount: 3, JpegCount: 3, MemorySizeMB: 71424}
	if diff := cmp.Diff(want, v1); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if v2.Id != 9 || v2.MemorySizeMB != 71424 || v3.Id != 9 || v3.MultiprocessorCount != 60 {
		t.Errorf("versions 2 and 3: %+v, %+v", v2, v3)
	}
	placements, r := h200.GetGpuInstancePossiblePlacements(&v1)
	ok(t, r)
	if diff := cmp.Diff([]nvml.GpuInstancePlacement{{Start: 0, Size: 4}, {Start: 4, Size: 4}}, placements); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for name, c := range map[string]struct{ got, want nvml.Return }{
		"6 slices":         {second(h200.GetGpuInstanceProfileInfo(nvml.GPU_INSTANCE_PROFILE_6_SLICE)), nvml.ERROR_NOT_SUPPORTED},
		"3 slices gfx":     {second(h200.GetGpuInstanceProfileInfo(0x11)), nvml.ERROR_INVALID_ARGUMENT},
		"MIG handle, off":  {second(h200.GetMigDeviceHandleByIndex(0)), nvml.ERROR_NOT_SUPPORTED},
		"profile of an L4": {second(l4.GetGpuInstanceProfileInfo(0)), nvml.ERROR_NOT_SUPPORTED},
		"fabric of an L4":  {second(l4.GetGpuFabricInfo()), nvml.ERROR_NOT_SUPPORTED},
		"NVLink of an L4":  {second(l4.GetNvLinkState(0)), nvml.ERROR_NOT_SUPPORTED},
		"a 19th NVLink":    {second(h200.GetNvLinkState(18)), nvml.ERROR_INVALID_ARGUMENT},
		"no other GPU":     {second(h200.GetNvLinkRemotePciInfo(0)), nvml.ERROR_NOT_SUPPORTED},
	} {
		if c.got != c.want {
			t.Errorf("%s: %v, want %v", name, c.got, c.want)
		}
	}
	if _, _, r := l4.GetMigMode(); r != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("MIG mode of an L4: %v", r)
	}
	if is, r := h200.IsMigDeviceHandle(); r != nvml.SUCCESS || is {
		t.Errorf("is a MIG device: %v, %v", is, r)
	}
	if n, r := h200.GetMaxMigDeviceCount(); r != nvml.SUCCESS || n != 0 {
		t.Errorf("max MIG devices %d, %v", n, r)
	}
	checkComputeModes(t, h200)
	v, r := h200.GetMemoryInfo()
	ok(t, r)
	w, r := h200.GetMemoryInfo_v2()
	ok(t, r)
	const mib = 1 << 20
	if v.Total != 143771*mib || v.Used != 616*mib || v.Free != 143155*mib || w.Total != v.Total || w.Reserved != 616*mib || w.Used != 0 || w.Free != v.Free {
		t.Errorf("memory %+v, %+v", v, w)
	}
	if mode, r := h200.GetAddressingMode(); r != nvml.SUCCESS || mode.Value != 0 {
		t.Errorf("addressing mode %v, %v", mode, r)
	}
}

func checkComputeModes(t *testing.T, d nvml.Device) {
	t.Helper()
	for _, mode := range []nvml.ComputeMode{nvml.COMPUTEMODE_EXCLUSIVE_PROCESS, nvml.COMPUTEMODE_PROHIBITED, nvml.COMPUTEMODE_DEFAULT} {
		ok(t, d.SetComputeMode(mode))
		if got, r := d.GetComputeMode(); r != nvml.SUCCESS || got != mode {
			t.Errorf("compute mode %v, %v, want %v", got, r, mode)
		}
	}
	_, r := d.SetMigMode(nvml.DEVICE_MIG_ENABLE)
	ok(t, r)
	if r := d.SetComputeMode(nvml.COMPUTEMODE_EXCLUSIVE_PROCESS); r != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("exclusive in MIG mode: %v", r)
	}
	_, r = d.SetMigMode(nvml.DEVICE_MIG_DISABLE)
	ok(t, r)
}

func second[T any](_ T, r nvml.Return) nvml.Return { return r }

func TestLibraryHealthAndEvents(t *testing.T) {
	if !ownProcess(t) {
		return
	}
	root := install(t, "2xh100-80gb")
	l := open(t, root)
	d := device(t, l, 1)
	set, r := l.EventSetCreate()
	ok(t, r)
	ok(t, d.RegisterEvents(nvml.EventTypeXidCriticalError, set))
	if _, r := set.Wait(1); r != nvml.ERROR_TIMEOUT {
		t.Errorf("nothing happened: %v", r)
	}
	waited := make(chan nvml.EventData)
	go func() {
		e, _ := set.Wait(60000)
		waited <- e
	}()
	nvmlsim(t, "break", "1", "--xid", "48", "--root", root) // another process
	if e := <-waited; e.Device != d || e.EventData != 48 || e.EventType != nvml.EventTypeXidCriticalError || e.GpuInstanceId != 0xFFFFFFFF || e.ComputeInstanceId != 0xFFFFFFFF {
		t.Errorf("event %+v", e)
	}
	ok(t, set.Free())
	if _, r := set.Wait(1); r != nvml.ERROR_INVALID_ARGUMENT {
		t.Errorf("freed set: %v", r)
	}
	values := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}, {FieldId: 9999}}
	ok(t, d.GetFieldValues(values))
	if values[0].NvmlReturn != uint32(nvml.SUCCESS) || values[0].Value != [8]byte{} || values[1].NvmlReturn != uint32(nvml.ERROR_NOT_SUPPORTED) {
		t.Errorf("fields %+v", values)
	}
	if _, _, pending, failed, r := d.GetRemappedRows(); r != nvml.SUCCESS || pending || failed {
		t.Errorf("remapped rows: %v %v %v", pending, failed, r)
	}
	if current, _, r := d.GetEccMode(); r != nvml.SUCCESS || current != nvml.FEATURE_ENABLED {
		t.Errorf("ECC: %v, %v", current, r)
	}
	if p, r := d.GetComputeRunningProcesses(); r != nvml.SUCCESS || len(p) != 0 {
		t.Errorf("processes %v, %v", p, r)
	}
	nvmlsim(t, "break", "1", "--lost", "--root", root)
	if _, r := d.GetUUID(); r != nvml.ERROR_GPU_IS_LOST {
		t.Errorf("lost: %v", r)
	}
	nvmlsim(t, "fault", "DeviceGetName", "--gpu", "0", "--code", "999", "--count", "1", "--root", root)
	if _, r := device(t, l, 0).GetName(); r != nvml.ERROR_UNKNOWN {
		t.Errorf("fault: %v", r)
	}
	if _, r := device(t, l, 0).GetName(); r != nvml.SUCCESS {
		t.Errorf("after the fault: %v", r)
	}
}
