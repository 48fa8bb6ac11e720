package cdi

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

func TestHooksAreFew(t *testing.T) {
	hooks := func() []*specs.Hook {
		return []*specs.Hook{
			{Args: []string{"nvidia-cdi-hook", "create-symlinks", "--link", "a::/b"}},
			{Args: []string{"nvidia-cdi-hook", "create-symlinks", "--link", "c::/d"}},
			{Args: []string{"nvidia-cdi-hook", "update-ldcache"}},
			{Args: []string{"nvidia-cdi-hook", "update-application-profile"}},
		}
	}
	links := []string{"nvidia-cdi-hook", "create-symlinks", "--link", "a::/b", "--link", "c::/d"}
	for name, tc := range map[string]struct {
		library string
		want    [][]string
	}{
		"driver without graphics": {
			library: "/usr/lib64/libcuda.so.580.1",
			want:    [][]string{links, {"nvidia-cdi-hook", "update-ldcache"}},
		},
		"driver with graphics": {
			library: "/usr/lib64/libEGL_nvidia.so.580.1",
			want:    [][]string{links, {"nvidia-cdi-hook", "update-ldcache"}, {"nvidia-cdi-hook", "update-application-profile"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			edits := &specs.ContainerEdits{Hooks: hooks(), Mounts: []*specs.Mount{{ContainerPath: tc.library}}}
			dropGraphicsHook(edits)
			mergeSymlinkHooks(edits)
			var got [][]string
			for _, h := range edits.Hooks {
				got = append(got, h.Args)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("hooks (-want +got):\n%s", diff)
			}
		})
	}
}

func TestMemoryLimitsCameWith615(t *testing.T) {
	for version, want := range map[string]bool{"580.159.04": false, "615.10": true, "620.01.02": true, "unknown": true} {
		if got := hasMemoryLimits(version); got != want {
			t.Errorf("%s: %v, want %v", version, got, want)
		}
	}
}

// TestOneProcessRunsHooks: hooks that run one after the other are one process; those at another
// time, of another program or with another environment aren't.
func TestOneProcessRunsHooks(t *testing.T) {
	hook := func(name, path, env string, args ...string) *specs.Hook {
		return &specs.Hook{HookName: name, Path: path, Env: []string{env}, Args: append([]string{"nvidia-cdi-hook"}, args...)}
	}
	const created, started, program, quiet = "createContainer", "startContainer", "/usr/bin/nvidia-cdi-hook", "NVIDIA_CTK_DEBUG=false"
	edits := &specs.ContainerEdits{Hooks: []*specs.Hook{
		hook(created, program, quiet, "create-symlinks", "--link", "a::/b"),
		hook(created, program, quiet, "enable-cuda-compat", "--host-driver-version=580.1"),
		hook(created, program, quiet, "update-ldcache", "--folder", "/usr/lib64"),
		hook(started, program, quiet, "later"),
		hook(created, program, quiet, "after that"),
		hook(created, "/usr/bin/another", quiet, "another program"),
		hook(created, "/usr/bin/another", "NVIDIA_CTK_DEBUG=true", "says more"),
	}}
	mergeHooks(edits)
	want := []*specs.Hook{
		hook(created, program, quiet, "create-symlinks", "--link", "a::/b", "--", "enable-cuda-compat", "--host-driver-version=580.1", "--", "update-ldcache", "--folder", "/usr/lib64"),
		hook(started, program, quiet, "later"),
		hook(created, program, quiet, "after that"),
		hook(created, "/usr/bin/another", quiet, "another program"),
		hook(created, "/usr/bin/another", "NVIDIA_CTK_DEBUG=true", "says more"),
	}
	if diff := cmp.Diff(want, edits.Hooks); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
