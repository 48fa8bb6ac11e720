package machine

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Main is the init program, with its arguments. It returns only when it fails.
func Main(args []string) error {
	switch {
	case len(args) == 1:
		return run(args[0])
	case len(args) > 2 && args[0] == viewCommand:
		return runViewed(strings.Split(args[1], ":"), args[2:])
	}
	return errors.New("usage: init STATE-DIR (started by localcluster; see localcluster --help)")
}

// run is pid 1 of the machine whose state directory on the host is given. It
// returns only when the machine could not be set up; a running machine ends
// by being killed.
func run(stateDir string) error {
	// Components must not inherit these: an end held open elsewhere never ends.
	syscall.CloseOnExec(GoFD)
	syscall.CloseOnExec(ReadyFD)
	ready := os.NewFile(ReadyFD, "ready")
	if err := waitForGo(os.NewFile(GoFD, "go")); err != nil {
		return err
	}
	supervisor, listener, err := setUp(stateDir)
	if err != nil {
		fmt.Fprint(ready, err)
		return err
	}
	go supervisor.serve(listener)
	supervisor.startAll()
	fmt.Fprint(ready, "ok")
	_ = ready.Close()
	supervisor.reap()
	return nil
}

func waitForGo(f *os.File) error {
	defer f.Close()
	if n, err := f.Read(make([]byte, 1)); n != 1 {
		return fmt.Errorf("the creator ended before the machine was ready: %w", err)
	}
	return nil
}

func setUp(stateDir string) (*supervisor, net.Listener, error) {
	spec, err := readSpec(filepath.Join(stateDir, SpecFile))
	if err != nil {
		return nil, nil, err
	}
	if err := unix.Sethostname([]byte(spec.Name)); err != nil {
		return nil, nil, fmt.Errorf("set host name %s: %w", spec.Name, err)
	}
	if err := mountRoot(spec); err != nil {
		return nil, nil, err
	}
	if err := writeSysctls(spec.Sysctls); err != nil {
		return nil, nil, err
	}
	if err := raiseFileLimit(); err != nil {
		return nil, nil, err
	}
	socket := filepath.Join(StateDir, SocketFile)
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, nil, fmt.Errorf("remove the old control socket: %w", err)
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return nil, nil, fmt.Errorf("listen on the control socket: %w", err)
	}
	return newSupervisor(spec), listener, nil
}

func readSpec(path string) (*Spec, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the machine's spec: %w", err)
	}
	spec := &Spec{}
	if err := json.Unmarshal(data, spec); err != nil {
		return nil, fmt.Errorf("read the machine's spec %s: %w", path, err)
	}
	return spec, nil
}

func writeSysctls(values map[string]string) error {
	for key, value := range values {
		path := "/proc/sys/" + strings.TrimPrefix(key, "/")
		if err := os.WriteFile(path, []byte(value), 0o644); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("set %s=%s: %w", key, value, err)
		}
	}
	return nil
}

// raiseFileLimit lifts the soft limit of open files to the hard one, which
// needs no privilege.
func raiseFileLimit() error {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("read the limit of open files: %w", err)
	}
	limit.Cur = limit.Max
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("raise the limit of open files: %w", err)
	}
	return nil
}
