package main_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/pkg/driverroot"
)

// TestWindowsSubsystem checks the driver of a machine of Windows Subsystem for Linux: where it
// is, that the library and nvidia-smi answer, and that a machine of the other kind may follow.
func TestWindowsSubsystem(t *testing.T) {
	if !ownProcess(t) {
		return
	}
	const machine = "{wsl: true, gpus: [{model: l4}]}"
	file := filepath.Join(t.TempDir(), "machine.yaml")
	if err := os.WriteFile(file, []byte(machine), 0o600); err != nil {
		t.Fatal(err)
	}
	root := install(t, file)
	got := files(t, root)
	for path := range got {
		if strings.HasPrefix(path, "dev/nvidia") || strings.HasPrefix(path, "proc/") || strings.HasPrefix(path, "sys/") || strings.HasPrefix(path, "usr/bin/") {
			t.Errorf("there is %s", path)
		}
	}
	if want := fmt.Sprintf("device %x", 10<<8|125); !strings.Contains(got["dev/dxg"], want) {
		t.Errorf("dev/dxg: %q, want %q", got["dev/dxg"], want)
	}
	found, err := driverroot.Find(driverroot.NewHost("/"), root)
	if err != nil {
		t.Fatal(err)
	}
	if found.DevRoot != root || found.Library != filepath.Join(root, "usr/lib/wsl/lib/libnvidia-ml.so.1") {
		t.Errorf("found %+v under %s", found, root)
	}
	program, err := found.Program(driverroot.NewHost("/"), "nvidia-smi")
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(filepath.Join(program.Root, program.Path), "--query-gpu=name,memory.total", "--format=csv,noheader").CombinedOutput()
	if err != nil || string(out) != "NVIDIA L4, 23034 MiB\n" {
		t.Errorf("nvidia-smi: %v: %s", err, out)
	}
	l := nvml.New(nvml.WithLibraryPath(found.Library))
	ok(t, l.Init())
	if _, r := device(t, l, 0).GetMinorNumber(); r != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("minor number: %v, want Not Supported", r)
	}
	ok(t, l.Shutdown())
	nvmlsim(t, "reboot", "--root", root)
	nvmlsim(t, "install", "--root", root, "--machine", "l4", "--node-name", "node-a")
	if got := files(t, root); got["dev/dxg"] != "" || got["usr/lib/wsl/lib/nvidia-smi"] != "" || got["dev/nvidia0"] == "" {
		t.Errorf("after the installation of another machine there are %v", got)
	}
	nvmlsim(t, "uninstall", "--root", root)
	if _, err := os.Stat(root); !os.IsNotExist(err) {
		t.Errorf("uninstall has left %v", files(t, root))
	}
}
