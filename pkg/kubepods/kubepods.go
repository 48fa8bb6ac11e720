// Package kubepods knows how the kubelet names the cgroups of pods, with both cgroup drivers
// and below a --cgroup-root.
package kubepods

import (
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// named matches the name of the cgroup of all pods, and with the systemd driver those of all
// cgroups below it. There, a --cgroup-root comes first.
const named = `(^|-)kubepods`

var (
	topPattern  = regexp.MustCompile(named + `(\.slice)?$`)
	podsPattern = regexp.MustCompile(named)
	uidPattern  = regexp.MustCompile(`pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})`)
)

// IsTop reports whether a cgroup with this name contains all pods.
func IsTop(name string) bool { return topPattern.MatchString(name) }

// Above returns the parent of the cgroup that contains all pods, from the path of a pod's or a
// container's cgroup; false if the path has no such cgroup.
func Above(path string) (string, bool) {
	elements := strings.Split(path, "/")
	i := slices.IndexFunc(elements, podsPattern.MatchString)
	if i < 0 {
		return "", false
	}
	return filepath.Clean("/" + strings.Join(elements[:i], "/")), true
}

// Dirs returns the possible directories of a pod's cgroup, one for each QoS class. top is the
// directory of the cgroup that contains all pods.
func Dirs(top, podUID string) []string {
	base, systemd := strings.CutSuffix(filepath.Base(top), ".slice")
	if !systemd {
		pod := "pod" + podUID
		return []string{filepath.Join(top, pod), filepath.Join(top, "burstable", pod), filepath.Join(top, "besteffort", pod)}
	}
	pod := "-pod" + strings.ReplaceAll(podUID, "-", "_") + ".slice"
	dirs := []string{filepath.Join(top, base+pod)}
	for _, class := range []string{"-burstable", "-besteffort"} {
		dirs = append(dirs, filepath.Join(top, base+class+".slice", base+class+pod))
	}
	return dirs
}

// PodUID returns the UID of the pod whose cgroup is in the text of a /proc/PID/cgroup; empty
// if there is none.
func PodUID(membership []byte) string {
	m := uidPattern.FindSubmatch(membership)
	if m == nil {
		return ""
	}
	return strings.ReplaceAll(string(m[1]), "_", "-")
}
