package containers

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sort"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
	"github.com/prometheus/procfs"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/tessera-dra/tessera/pkg/kubepods"
)

// mount is a claim's mark in the mount namespace of a process.
type mount struct {
	claimUID string
	// deleted means that the mark has been unlinked.
	deleted bool
	pid     int
}

// scan reads the mounts of all processes of the host, once for each mount
// namespace. With an error about one of them, the result still has the mounts of the others.
func (c *Containers) scan() ([]mount, error) {
	host, err := procfs.NewFS(c.host.Path("/proc"))
	if err != nil {
		return nil, fmt.Errorf("list the host's processes: %w", err)
	}
	processes, err := host.AllProcs()
	if err != nil {
		return nil, fmt.Errorf("list the host's processes: %w", err)
	}
	sort.Sort(processes) // of a namespace, the first process is named
	seen := map[string]bool{}
	var mounts []mount
	var errs []error
	for _, p := range processes {
		// A process that has just ended can't be read.
		namespace, err := os.Readlink(c.process(p.PID, "ns/mnt"))
		if err != nil || seen[namespace] {
			continue
		}
		text, err := os.ReadFile(c.process(p.PID, "mountinfo"))
		if err != nil || len(text) == 0 {
			continue
		}
		seen[namespace] = true
		found, err := parseMounts(text, p.PID)
		mounts, errs = append(mounts, found...), append(errs, err)
	}
	return mounts, errors.Join(errs...)
}

func (c *Containers) process(pid int, file string) string {
	return c.host.Path(filepath.Join("/proc", strconv.Itoa(pid), file))
}

// parseMounts finds marks in a mountinfo file.
func parseMounts(text []byte, pid int) ([]mount, error) {
	all, err := mountinfo.GetMountsFromReader(linesWith(text, MountDir), nil)
	if err != nil {
		return nil, fmt.Errorf("read the mounts of process %d: %w", pid, err)
	}
	var marks []mount
	for _, m := range all {
		if uid, ok := claimOf(m); ok {
			marks = append(marks, mount{claimUID: uid, deleted: strings.HasSuffix(m.Root, "//deleted"), pid: pid})
		}
	}
	return marks, nil
}

// linesWith returns the lines that contain one of the texts. The library fails for all mounts if
// it can't read one, such as an overlay of so many directories that its line is too long.
func linesWith(text []byte, some ...string) io.Reader {
	var lines bytes.Buffer
	for line := range bytes.Lines(text) {
		if slices.ContainsFunc(some, func(s string) bool { return bytes.Contains(line, []byte(s)) }) {
			lines.Write(line)
		}
	}
	return &lines
}

// claimOf returns the claim whose mark is mounted. A container can have other mounts at such
// paths.
func claimOf(m *mountinfo.Info) (uid string, ok bool) {
	uid, ok = strings.CutPrefix(m.Mountpoint, MountDir+"/")
	return uid, ok && uidPattern.MatchString(uid)
}

// describeLeft lists the processes that have a claim's marks mounted, with their
// pods, and the pods whose cgroups aren't empty.
func (c *Containers) describeLeft(claimUID string, pods []kubeletplugin.NamespacedObject) string {
	var names []string
	named := map[string]bool{}
	mounts, _ := c.scan() // on an error some may be missing
	for _, m := range mounts {
		if m.claimUID != claimUID {
			continue
		}
		process := fmt.Sprintf("process %d (%s)", m.pid, c.command(m.pid))
		if uid := c.podOf(m.pid); uid != "" {
			process += " of pod " + c.podName(uid, pods)
			named[uid] = true
		}
		names = append(names, process)
	}
	for _, p := range pods {
		uid := string(p.UID)
		if _, populated, err := c.cgroups.populated(uid); err == nil && populated && !named[uid] {
			names = append(names, "a process of pod "+c.podName(uid, pods))
		}
	}
	if len(names) == 0 {
		return "they have just ended"
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}

func (c *Containers) command(pid int) string {
	data, err := os.ReadFile(c.process(pid, "comm"))
	if err != nil {
		return "ended"
	}
	return strings.TrimSpace(string(data))
}

func (c *Containers) podOf(pid int) string {
	data, err := os.ReadFile(c.process(pid, "cgroup"))
	if err != nil {
		return ""
	}
	return kubepods.PodUID(data)
}

// podName returns the pod's namespace/name from the claim's record or from the
// directory of the pod's logs, otherwise its UID.
func (c *Containers) podName(uid string, pods []kubeletplugin.NamespacedObject) string {
	for _, p := range pods {
		if string(p.UID) == uid {
			return p.Namespace + "/" + p.Name
		}
	}
	namespace, name := c.logged(uid)
	if name == "" {
		return "with UID " + uid
	}
	return namespace + "/" + name
}

// logged returns a pod's namespace and name from the directory of its logs; empty if
// there is none.
func (c *Containers) logged(uid string) (namespace, name string) {
	logs, err := filepath.Glob(c.host.Path("/var/log/pods/*_" + uid))
	if err != nil || len(logs) == 0 {
		return "", ""
	}
	namespace, name, _ = strings.Cut(strings.TrimSuffix(filepath.Base(logs[0]), "_"+uid), "_")
	return namespace, name
}

// PodOf returns the pod of a process of the host. The UID is empty if it is in none;
// namespace and name are empty if they can't be found out.
func (c *Containers) PodOf(pid int) (namespace, name, uid string) {
	if uid = c.podOf(pid); uid == "" {
		return "", "", ""
	}
	namespace, name = c.logged(uid)
	return namespace, name, uid
}

// User is the container that a process of the host is in.
type User struct {
	PodUID string
	// Container is the container's name; empty if the pod has it write no termination
	// message.
	Container string
	// Claims are the UIDs of the claims that the container uses.
	Claims []string
}

// terminationLogPattern matches the host's path of the file that the kubelet mounts for
// the container's termination message.
var terminationLogPattern = regexp.MustCompile(`/pods/([^/]+)/containers/([^/]+)/[0-9a-f]{1,8}$`)

// UserOf returns the container of a process of the host, and false if it is in none, or
// has ended. A process in a mount namespace that it made itself may have no claims.
func (c *Containers) UserOf(pid int) (User, bool) {
	u := User{PodUID: c.podOf(pid)}
	if u.PodUID == "" {
		return User{}, false
	}
	text, err := os.ReadFile(c.process(pid, "mountinfo"))
	if err != nil {
		return User{}, false
	}
	mounts, err := mountinfo.GetMountsFromReader(linesWith(text, MountDir, "/containers/"), nil)
	if err != nil {
		return User{}, false
	}
	for _, m := range mounts {
		if uid, ok := claimOf(m); ok {
			u.Claims = append(u.Claims, uid)
		}
		if log := terminationLogPattern.FindStringSubmatch(m.Root); log != nil && log[1] == u.PodUID {
			u.Container = log[2]
		}
	}
	return u, true
}

// NameOf returns the namespace and name of a pod of this node; empty if they can't be found
// out.
func (c *Containers) NameOf(podUID string) (namespace, name string) { return c.logged(podUID) }
