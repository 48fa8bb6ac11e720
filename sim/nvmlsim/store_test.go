package nvmlsim_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// helperEnv makes the test binary run as another process on the simulated
// machine.
const helperEnv = "NVMLSIM_TEST_PROCESS"

func TestMain(m *testing.M) {
	if role := os.Getenv(helperEnv); role != "" {
		if err := helper(role, os.Args[1]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// helper is the main function of the other process: it writes in an endless
// loop, or waits for an event.
func helper(role, path string) error {
	m, err := nvmlsim.Open(path)
	if err != nil {
		return err
	}
	switch role {
	case "write":
		fmt.Println("ready")
		for {
			if err := raise(m); err != nil {
				return err
			}
		}
	case "count":
		for range 200 {
			if err := raise(m); err != nil {
				return err
			}
		}
		return nil
	case "wait":
		set, err := m.NewEventSet()
		if err != nil {
			return err
		}
		if err := set.Register(m.GPUs()[2], nvmlsim.XIDCriticalError); err != nil {
			return err
		}
		fmt.Println("ready")
		e, err := set.Wait(context.Background(), time.Minute)
		fmt.Println(e.GPU, e.Data)
		return err
	}
	return holdOn(m, role)
}

// holdOn uses the first GPU until the process is killed.
func holdOn(m *nvmlsim.Machine, role string) error {
	if role != "hold" {
		return errors.New("unknown role")
	}
	h, err := m.Hold()
	if err != nil {
		return err
	}
	if err := h.Set([]nvmlsim.Use{{On: m.CUDADevices(nil)[0], PID: uint32(os.Getpid()), Memory: 1 << 20}}); err != nil {
		return err
	}
	fmt.Println("ready")
	err = unix.Pause()
	runtime.KeepAlive(h) // the garbage collector would close it
	return err
}

// raise makes a change that is recognizable if it is stored only partly: all
// GPUs get the same temperature, one higher than before.
func raise(m *nvmlsim.Machine) error {
	store, err := nvmlsim.OpenStore(m.StatePath())
	if err != nil {
		return err
	}
	defer store.Close()
	return store.Update(func(s *nvmlsim.State) error {
		for i := range s.GPUs {
			s.GPUs[i].Temperature++
		}
		return nil
	})
}

func whole(s *nvmlsim.State) error {
	if s == nil || len(s.GPUs) != 8 {
		return fmt.Errorf("state %+v", s)
	}
	for _, g := range s.GPUs {
		if g.Temperature != s.GPUs[0].Temperature {
			return fmt.Errorf("a torn state: %+v", s.GPUs)
		}
	}
	return nil
}

func start(t *testing.T, role, path string) (*exec.Cmd, *bufio.Reader) {
	t.Helper()
	c := exec.Command(os.Args[0], path)
	c.Env = append(os.Environ(), helperEnv+"="+role)
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	check(t, err)
	check(t, c.Start())
	return c, bufio.NewReader(out)
}

func TestProcessesAndGoroutinesShareOneState(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	m := createAt(t, path, eight)
	before := m.State().GPUs[0].Temperature
	const processes, goroutines, each = 4, 64, 5
	var others []*exec.Cmd
	for range processes {
		c, _ := start(t, "count", path)
		others = append(others, c)
	}
	var wg sync.WaitGroup
	for range goroutines {
		wg.Go(func() {
			for range each {
				if err := raise(m); err != nil {
					t.Error(err)
				}
				for range 20 {
					if err := whole(m.State()); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	for _, c := range others {
		check(t, c.Wait())
	}
	if got, want := m.State().GPUs[0].Temperature-before, uint32(processes*200+goroutines*each); got != want {
		t.Errorf("%d updates arrived of %d", got, want)
	}
}

func TestKilledWriterLeavesAWholeState(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	m := createAt(t, path, eight)
	for range 20 {
		c, out := start(t, "write", path)
		_, err := out.ReadString('\n')
		check(t, err)
		seen := m.State().GPUs[0].Temperature
		for m.State().GPUs[0].Temperature < seen+3 {
			check(t, whole(m.State()))
		}
		check(t, c.Process.Kill())
		_, _ = io.Copy(io.Discard, out)
		_ = c.Wait() // killed
		check(t, whole(m.State()))
		check(t, raise(m)) // the kernel has released its lock
	}
}

func TestEventWakesAnotherProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	m := createAt(t, path, eight)
	c, out := start(t, "wait", path)
	_, err := out.ReadString('\n')
	check(t, err)
	check(t, m.RaiseXID(2, nvmlsim.XID{Code: 48}))
	line, err := out.ReadString('\n')
	check(t, err)
	if line != "2 48\n" {
		t.Errorf("the other process saw %q", line)
	}
	check(t, c.Wait())
}

func TestStateFileThatIsNone(t *testing.T) {
	dir := t.TempDir()
	for name, c := range map[string]struct {
		content []byte
		want    string
	}{
		"empty":   {nil, "too short"},
		"foreign": {make([]byte, 3<<20), "not a state file"},
	} {
		path := filepath.Join(dir, name)
		check(t, os.WriteFile(path, c.content, 0o644))
		if _, err := nvmlsim.Open(path); err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := nvmlsim.Open(filepath.Join(dir, "none")); !errors.Is(err, nvmlsim.ErrNoState) {
		t.Errorf("none: %v", err)
	}
}

func TestReinstallingAnotherMachineReachesOpenSessions(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	old := createAt(t, path, eight)
	createAt(t, path, "2xl4")
	if _, err := old.GPUs()[7].Name(); err != nvmlsim.GPUIsLost {
		t.Errorf("a GPU that is gone: %v", err)
	}
}

func BenchmarkRead(b *testing.B) {
	spec, _ := nvmlsim.ParseSpec([]byte(eight))
	d, _ := nvmlsim.Describe(spec, "n")
	m, err := nvmlsim.Create(filepath.Join(b.TempDir(), "state"), d)
	if err != nil {
		b.Fatal(err)
	}
	defer m.Close()
	for b.Loop() {
		if _, err := m.GPUs()[0].MinorNumber(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkUpdate(b *testing.B) {
	spec, _ := nvmlsim.ParseSpec([]byte(eight))
	d, _ := nvmlsim.Describe(spec, "n")
	m, err := nvmlsim.Create(filepath.Join(b.TempDir(), "state"), d)
	if err != nil {
		b.Fatal(err)
	}
	defer m.Close()
	for b.Loop() {
		if err := m.RaiseXID(0, nvmlsim.XID{Code: 31}); err != nil {
			b.Fatal(err)
		}
	}
}

// The plugin's container often has the driver root mounted read-only.
func TestReadOnlyMount(t *testing.T) {
	dir, ro := t.TempDir(), t.TempDir()
	m := createAt(t, filepath.Join(dir, "state"), eight)
	check(t, unix.Mount(dir, ro, "", unix.MS_BIND, ""))
	defer func() { check(t, unix.Unmount(ro, unix.MNT_DETACH)) }()
	check(t, unix.Mount("", ro, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	reader, err := nvmlsim.Open(filepath.Join(ro, "state"))
	check(t, err)
	defer reader.Close()

	if err := reader.Lose(0); nvmlsim.Code(err) != nvmlsim.NoPermission {
		t.Errorf("change: %v, want No Permission", err)
	}
	check(t, m.Fault(nvmlsim.Fault{Call: "DeviceGetUUID", GPU: 0, Code: nvmlsim.Unknown, Count: 1}))
	if _, err := reader.GPUs()[0].UUID(); err != nvmlsim.Unknown {
		t.Errorf("fault: %v", err)
	}
	set, err := reader.NewEventSet()
	check(t, err)
	check(t, set.Register(reader.GPUs()[1], nvmlsim.XIDCriticalError))
	go func() {
		if err := m.RaiseXID(1, nvmlsim.XID{Code: 48}); err != nil {
			t.Error(err)
		}
	}()
	e, err := set.Wait(context.Background(), time.Minute)
	if err != nil || e.Data != 48 {
		t.Errorf("event %+v, %v", e, err)
	}
}
