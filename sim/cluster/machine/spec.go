// Package machine is one simulated machine of a local cluster: the program that
// runs as pid 1 inside the machine's namespaces, and the words it shares with
// the cluster package outside.
//
// A machine is a process tree in PID, mount, UTS and network namespaces of its
// own. Pid 1 builds the machine's file system view, starts the components it
// was told to, restarts those that die, reaps orphans and answers a control
// socket. Killing pid 1 is how a machine is switched off: the kernel then ends
// every process in it and drops its mounts and network links, so nothing has
// to be cleaned up by hand.
//
// The package knows nothing of Kubernetes. It is imported by sim/cluster, its
// package platform and its own init program only, and uses the standard library and
// golang.org/x/sys alone, so that pid 1 stays small.
package machine

// Paths inside every machine.
const (
	// StateDir is where the machine's own state directory appears: spec,
	// control socket, logs, credentials.
	StateDir = "/run/localcluster"
	// BinDir holds the cluster's binaries, read-only.
	BinDir = "/opt/localcluster/bin"
)

// Names of files in the machine's state directory.
const (
	SpecFile    = "machine.json"
	SocketFile  = "control.sock"
	LogDir      = "logs"
	FilesDir    = "files"
	InitLogFile = "init.log"
)

// Spec describes a machine. It is written as JSON to SpecFile before the
// machine starts. Of later changes pid 1 follows those of a component, with
// OpStart.
type Spec struct {
	// Name is the machine's host name.
	Name string `json:"name"`
	// State is the host's path of the machine's state directory.
	State string `json:"state"`
	// Bin is the host's path of the directory shown at BinDir.
	Bin string `json:"bin"`
	// Dirs are absolute paths that get a directory of their own in this
	// machine, kept under State/FilesDir with the same path.
	Dirs []string `json:"dirs"`
	// HostDirs are directories and files of the host's /run that the machine
	// sees too, where the host has them.
	HostDirs []string `json:"hostDirs,omitempty"`
	// HiddenDirs are directories of the host, with the file systems mounted
	// in them, that the machine must not see.
	HiddenDirs []string `json:"hiddenDirs,omitempty"`
	// Sysctls are written below /proc/sys of the machine's network namespace.
	Sysctls map[string]string `json:"sysctls,omitempty"`
	// MaskedSysctls are replaced by plain files with these contents, so that a
	// component that sets them does not change the host's kernel.
	MaskedSysctls map[string]string `json:"maskedSysctls,omitempty"`
	// OnlyMountedControllers hides from the machine the controllers of cgroup version 1 that the
	// host has mounted nowhere.
	OnlyMountedControllers bool `json:"onlyMountedControllers,omitempty"`
	// Links are symbolic links, by their path, in place of what the host has there. If that is
	// a directory, and the host has nothing where the link leads, the machine has the
	// directory there. In Dirs and Mounts a link takes the place of a file or an empty directory.
	Links map[string]string `json:"links,omitempty"`
	// OwnDevices gives the machine a /dev of its own, with the host's nodes but those of
	// NVIDIA's driver, and lets it add files to the kernel's own: in /proc/driver,
	// /proc/devices, /sys/devices (but not in virtual), /sys/bus/pci/devices and /sys/module.
	// They go with the machine.
	OwnDevices bool `json:"ownDevices,omitempty"`
	// Mounts are made together with Dirs, HostDirs, StateDir, BinDir and what the host has
	// mounted, parents first: none of them hides another one below it. Of those with the same
	// path the last one counts. No path may lead through one of Links.
	Mounts []Mount `json:"mounts,omitempty"`
	// Components are started together, each as soon as its WaitFor answers.
	Components []Component `json:"components"`
}

// Mount is a file system of a machine.
type Mount struct {
	// Path of the directory. It is made if it isn't there.
	Path string `json:"path"`
	// Type: "" gives other options to what is there; tmpfs is empty whenever the machine is
	// switched on; disk is a directory below State/FilesDir; overlay shows what is there and
	// takes all writes until the machine is switched off. / can only have the type "".
	Type string `json:"type,omitempty"`
	// Options: ro, noexec, nosuid, nodev. They don't count for what is mounted below, and
	// an option that isn't named is off.
	Options []string `json:"options,omitempty"`
}

// Component is one long-running program of a machine.
type Component struct {
	Name string   `json:"name"`
	Args []string `json:"args"`
	Env  []string `json:"env,omitempty"`
	// WaitFor are addresses (unix:///path or tcp://host:port) that must accept
	// a connection before the component is started.
	WaitFor []string `json:"waitFor,omitempty"`
	// View are the directories of the machine that the component sees, besides the programs
	// and libraries of the host, its /etc read-only, the kernel's file systems, BinDir and
	// StateDir. What it mounts in them is seen by the machine too. They are made if they aren't
	// there. If there are none, it sees all.
	View []string `json:"view,omitempty"`
}

// Request is one line of JSON sent to the control socket; one Response line
// comes back.
type Request struct {
	Op        string `json:"op"`
	Component string `json:"component,omitempty"`
	Signal    int    `json:"signal,omitempty"`
}

// Operations of a Request.
const (
	OpStatus = "status" // report all components
	OpSignal = "signal" // send Signal to Component; it is restarted if it dies
	OpStop   = "stop"   // end Component and leave it down
	OpStart  = "start"  // start Component again after OpStop, as the spec says now
)

// Response answers a Request. Error is empty on success.
type Response struct {
	Error      string            `json:"error,omitempty"`
	Components []ComponentStatus `json:"components,omitempty"`
}

// ComponentStatus is the state of a component as pid 1 knows it. PID is 0 while
// the component isn't running and counts in the machine's PID namespace.
type ComponentStatus struct {
	Name     string `json:"name"`
	PID      int    `json:"pid"`
	Restarts int    `json:"restarts"`
	Stopped  bool   `json:"stopped,omitempty"`
	LastExit string `json:"lastExit,omitempty"`
}

// Files that pid 1 finds open when it starts.
const (
	// GoFD is read once: pid 1 waits there until the creator has placed it in
	// its cgroup and connected its network. End of file without a byte means
	// that the creator is gone, and pid 1 exits.
	GoFD = 3
	// ReadyFD takes the outcome: "ok", or the error that stopped pid 1.
	ReadyFD = 4
)
