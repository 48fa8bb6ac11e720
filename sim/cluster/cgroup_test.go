package cluster

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseHierarchies(t *testing.T) {
	for name, tc := range map[string]struct {
		mounts      string
		controllers []string // mount points of cgroup2 with controllers
		want        []hierarchy
	}{
		"v2": {
			mounts:      "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n",
			controllers: []string{"/sys/fs/cgroup"},
			want:        []hierarchy{{path: "/sys/fs/cgroup", v2: true}},
		},
		"v1 with an empty v2 beside it": {
			mounts: "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n" +
				"cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\n" +
				"cgroup /sys/fs/cgroup/systemd cgroup rw,name=systemd 0 0\n" +
				"cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n",
			want: []hierarchy{
				{path: "/sys/fs/cgroup/cpuset", cpuset: true},
				{path: "/sys/fs/cgroup/systemd"},
				{path: "/sys/fs/cgroup/unified"},
			},
		},
		"none": {mounts: "proc /proc proc rw 0 0\n"},
	} {
		t.Run(name, func(t *testing.T) {
			got := parseHierarchies(tc.mounts, func(path string) bool { return slices.Contains(tc.controllers, path) })
			if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(hierarchy{})); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// fakeGroup makes a directory that looks like a cgroup.
func fakeGroup(t *testing.T, path string, files map[string]string) {
	t.Helper()
	writeTree(t, path, files)
}

func TestInheritCpuset(t *testing.T) {
	parent := t.TempDir()
	fakeGroup(t, parent, map[string]string{"cpuset.cpus": "0-1\n", "cpuset.mems": "0\n"})
	child := filepath.Join(parent, "child")
	fakeGroup(t, child, map[string]string{"cpuset.cpus": "\n", "cpuset.mems": "1\n"})
	if err := inheritCpuset(child); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{"cpuset.cpus": "0-1\n", "cpuset.mems": "1\n"} {
		got, err := os.ReadFile(filepath.Join(child, file))
		if err != nil {
			t.Fatal(err)
		}
		if string(got) != want {
			t.Errorf("%s: got %q, want %q", file, got, want)
		}
	}
}

func TestReadPIDsSkipsOthersNamespaces(t *testing.T) {
	dir := t.TempDir()
	fakeGroup(t, dir, map[string]string{"cgroup.procs": "0\n1\n42\n"})
	got, err := readPIDs(filepath.Join(dir, "cgroup.procs"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]int{42}, got); diff != "" {
		t.Error(diff)
	}
}
