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
