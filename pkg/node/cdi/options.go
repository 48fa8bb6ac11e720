package cdi

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"k8s.io/klog/v2"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/cdihook"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// options returns the options for nvcdi. It runs inside Host.Do, where / is the host's
// root.
func options(cfg Config, d *Driver) []nvcdi.Option {
	opts := []nvcdi.Option{
		nvcdi.WithMode(nvcdi.ModeNvml),
		nvcdi.WithLogger(logger{klog.Background().WithName("nvcdi")}),
		nvcdi.WithNvmlLib(nvml.Facts(d.Version, d.GPUs)),
		nvcdi.WithDriverRoot(d.Root),
		nvcdi.WithDevRoot(d.DevRoot),
		nvcdi.WithNVIDIACDIHookPath(cfg.HookPath),
		nvcdi.WithDisabledHooks(uselessHooks(d)...),
		// It would load another library for facts that NVML has too.
		nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils),
	}
	if len(d.LibraryDirs) > 0 {
		opts = append(opts, nvcdi.WithLibrarySearchPaths(d.LibraryDirs))
	}
	return opts
}

// uselessHooks returns the hooks without effect on this host: containers start the later for each.
func uselessHooks(d *Driver) []string {
	var useless []string
	if !hasMemoryLimits(d.Version) {
		useless = append(useless, "apply-cuda-memory-limits")
	}
	if !modifiesDeviceFiles() {
		useless = append(useless, string(nvcdi.DisableDeviceNodeModificationHook))
	}
	return useless
}

// dropGraphicsHook removes the hook that sets the visible GPUs of EGL and
// Vulkan if the driver is installed without them, as on most servers.
func dropGraphicsHook(edits *specs.ContainerEdits) {
	for _, m := range edits.Mounts {
		if strings.HasPrefix(filepath.Base(m.ContainerPath), "libEGL_nvidia.so") {
			return
		}
	}
	edits.Hooks = slices.DeleteFunc(edits.Hooks, func(h *specs.Hook) bool {
		return slices.Contains(h.Args, applicationProfileHook)
	})
}

// mergeSymlinkHooks moves all links to the first hook that creates links: nvcdi
// has one such hook for the libraries and one for graphics.
func mergeSymlinkHooks(edits *specs.ContainerEdits) {
	const fixed = 2 // arguments before those that name links: program and hook
	var first *specs.Hook
	edits.Hooks = slices.DeleteFunc(edits.Hooks, func(h *specs.Hook) bool {
		if len(h.Args) < fixed || h.Args[1] != string(nvcdi.CreateSymlinksHook) {
			return false
		}
		if first == nil {
			first = h
			return false
		}
		first.Args = append(first.Args, h.Args[fixed:]...)
		return true
	})
}

// mergeHooks lets one process run all hooks that would run directly one after the other:
// starting a process for each takes longer than most of them do. The order stays.
func mergeHooks(edits *specs.ContainerEdits) {
	var last *specs.Hook
	edits.Hooks = slices.DeleteFunc(edits.Hooks, func(h *specs.Hook) bool {
		if last == nil || last.HookName != h.HookName || last.Path != h.Path || !slices.Equal(last.Env, h.Env) {
			last = h
			return false
		}
		last.Args = cdihook.Join(last.Args, h.Args)
		return true
	})
}

// applicationProfileHook has no exported name.
const applicationProfileHook = "update-application-profile"

// hasMemoryLimits reports whether the driver has nvmlDeviceSetMemoryLimits,
// which was added in 615.
func hasMemoryLimits(version string) bool {
	major, _, _ := strings.Cut(version, ".")
	n, err := strconv.Atoi(major)
	return err != nil || n >= 615
}

// modifiesDeviceFiles reports whether the driver's user space creates device
// nodes, as it does by default; in a container it would create those of other
// GPUs too.
func modifiesDeviceFiles() bool {
	params, err := os.ReadFile("/proc/driver/nvidia/params")
	if err != nil {
		return false // without the file the hook does nothing either
	}
	return !strings.Contains(string(params), "ModifyDeviceFiles: 0")
}

// logger logs nvcdi's messages, mostly about missing optional files of a
// driver, at a high verbosity.
type logger struct{ klog.Logger }

func (l logger) Debugf(string, ...any)               {}
func (l logger) Tracef(string, ...any)               {}
func (l logger) Infof(format string, args ...any)    { l.say(format, args) }
func (l logger) Warningf(format string, args ...any) { l.say(format, args) }
func (l logger) Errorf(format string, args ...any)   { l.say(format, args) }

func (l logger) say(format string, args []any) {
	if v := l.V(4); v.Enabled() {
		v.Info(fmt.Sprintf(format, args...))
	}
}
