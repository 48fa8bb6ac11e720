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

	"github.com/tessera-dra/tessera/pkg/nvml"
)

// options for nvcdi; called with the host's root directory.
func options(cfg Config, d *Driver) []nvcdi.Option {
	opts := []nvcdi.Option{
		nvcdi.WithMode(nvcdi.ModeNvml),
		nvcdi.WithLogger(logger{klog.Background().WithName("nvcdi")}),
		nvcdi.WithNvmlLib(nvml.Facts(d.Version, d.GPUs)),
		nvcdi.WithDriverRoot(d.Root),
		nvcdi.WithDevRoot(d.DevRoot),
		nvcdi.WithNVIDIACDIHookPath(cfg.HookPath),
		nvcdi.WithDisabledHooks(uselessHooks(d)...),
		// It would be loaded into this process to tell what NVML tells too.
		nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils),
	}
	if len(d.LibraryDirs) > 0 {
		opts = append(opts, nvcdi.WithLibrarySearchPaths(d.LibraryDirs))
	}
	return opts
}

// uselessHooks are those that could do nothing on this host. Each hook is a
// program that is started before a container is, some milliseconds each.
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

// dropGraphicsHook takes out the hook that tells EGL and Vulkan which GPUs they
// may see, where the driver comes without them, as on most servers.
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

// mergeSymlinkHooks makes all links with the first hook that makes any: nvcdi
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

// applicationProfileHook has no exported name.
const applicationProfileHook = "update-application-profile"

// hasMemoryLimits: nvmlDeviceSetMemoryLimits came with driver 615.
func hasMemoryLimits(version string) bool {
	major, _, _ := strings.Cut(version, ".")
	n, err := strconv.Atoi(major)
	return err != nil || n >= 615
}

// modifiesDeviceFiles says whether the driver's user space makes device nodes
// by itself, as it does by default; in a container it would make those of
// other GPUs too.
func modifiesDeviceFiles() bool {
	params, err := os.ReadFile("/proc/driver/nvidia/params")
	if err != nil {
		return false // the hook, too, does nothing without the file
	}
	return !strings.Contains(string(params), "ModifyDeviceFiles: 0")
}

// logger turns what nvcdi has to say, mostly on files that optional parts of a
// driver lack, into lines for those who look for them.
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
