package driverroot

import "path/filepath"

const (
	// wslDir is where WSL mounts the libraries and nvidia-smi of the driver of Windows.
	wslDir = "usr/lib/wsl/lib"

	miscMajor = 10
	// dxgMinor is a dynamic number; this one is assumed.
	dxgMinor = 125
)

// wslLayout returns all entries of a machine of Windows Subsystem for Linux. It has
// neither a kernel module nor the driver's files in /proc and /sys; programs reach all GPUs
// through /dev/dxg. The order is that of layout.
func wslLayout(o Options, t tree) ([]entry, error) {
	image, err := readLibrary(o, t)
	if err != nil {
		return nil, err
	}
	smi, err := smiEntry(o, t)
	if err != nil {
		return nil, err
	}
	device, log := charDevice("dev/dxg", miscMajor, dxgMinor), kernelLog()
	device.path, log.path = filepath.Join(t.kernel, device.path), filepath.Join(t.kernel, log.path)
	in := func(name string) string { return filepath.Join(t.libraries, name) }
	return []entry{
		device, log, smi,
		file(in("libdxcore.so"), 0o755, emptyLibrary("libdxcore.so")),
		file(in("libcuda.so.1.1"), 0o755, emptyLibrary("libcuda.so.1")),
		link(in("libcuda.so.1"), "libcuda.so.1.1"),
		link(in("libcuda.so"), "libcuda.so.1"),
		file(in(nvml), 0o755, image),
	}, nil
}
