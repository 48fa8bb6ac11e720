package cdihook_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/cdihook"
)

func TestJoinedHooksAreSplit(t *testing.T) {
	const program = "nvidia-cdi-hook"
	links := []string{"create-symlinks", "--link", "libcuda.so.1::/usr/lib64/libcuda.so"}
	cache := []string{"update-ldcache", "--folder", "/usr/lib64"}
	compat := []string{"enable-cuda-compat", "--host-driver-version=580.159.04"}
	all := append([]string{program}, links...)
	for _, h := range [][]string{compat, cache} {
		all = cdihook.Join(all, append([]string{program}, h...))
	}
	if diff := cmp.Diff([][]string{links, compat, cache}, cdihook.Split(all)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestSingleHooks: specifications of earlier releases, which are there until the plugin has
// written them again, have a hook for each call.
func TestSingleHooks(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		want [][]string
	}{
		"one hook":     {[]string{"nvidia-cdi-hook", "update-ldcache", "--folder", "/usr/lib64"}, [][]string{{"update-ldcache", "--folder", "/usr/lib64"}}},
		"only a flag":  {[]string{"nvidia-cdi-hook", "--help"}, [][]string{{"--help"}}},
		"no argument":  {[]string{"nvidia-cdi-hook"}, [][]string{nil}},
		"not even one": {nil, [][]string{nil}},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, cdihook.Split(tc.args)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
