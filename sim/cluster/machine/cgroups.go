package machine

import (
	"bytes"
	"fmt"
	"os"
)

const cgroupsFile = "/proc/cgroups"

// disableUnmounted has the machine's /proc/cgroups say of controllers of version 1 that are mounted
// nowhere that they are off. CRI-O uses those that are on.
func (r *root) disableUnmounted() error {
	if !r.spec.OnlyMountedControllers {
		return nil
	}
	text, err := os.ReadFile(cgroupsFile)
	if err != nil {
		return fmt.Errorf("read the cgroup controllers: %w", err)
	}
	return replaceFile(cgroupsFile, onlyMounted(text))
}

// onlyMounted disables the controllers that have no hierarchy. Where none has one, all are of version 2.
func onlyMounted(text []byte) []byte {
	var all bytes.Buffer
	mounted := false
	for line := range bytes.Lines(text) {
		fields := bytes.Fields(line) // name, hierarchy, number of groups, enabled
		if len(fields) != 4 || line[0] == '#' {
			all.Write(line)
			continue
		}
		if string(fields[1]) == "0" {
			fields[3] = []byte("0")
		} else {
			mounted = true
		}
		all.Write(append(bytes.Join(fields, []byte("\t")), '\n'))
	}
	if !mounted {
		return text
	}
	return all.Bytes()
}
