package driverroot

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// Modprobe implements the used options of nvidia-modprobe: "-u" creates the device
// nodes of nvidia-uvm, "-c0" those of GPU 0 and nvidiactl, in the driver root of
// the file at path. It returns the exit status, 1 if a node stays missing.
func Modprobe(path string, args []string) int {
	root, d, err := nvmlsim.Embedded(path)
	if err != nil {
		return 1
	}
	var wanted []string
	for _, arg := range args {
		if n, ok := strings.CutPrefix(arg, "-c"); ok {
			wanted = append(wanted, "dev/nvidiactl", "dev/nvidia"+n)
		} else if arg == "-u" {
			wanted = append(wanted, "dev/nvidia-uvm", "dev/nvidia-uvm-tools")
		}
	}
	for _, e := range deviceEntries(d) {
		if !slices.Contains(wanted, e.path) {
			continue
		}
		if missing(e.path, gpusOf(root)) {
			fmt.Printf("nvidia-modprobe: can't make /%s\n", e.path)
			return 1
		}
		if err := e.put(filepath.Join(nvmlsim.KernelDir(root), e.path)); err != nil {
			fmt.Println("nvidia-modprobe:", err)
			return 1
		}
	}
	return 0
}
