// Command crio-runc is runc on hosts where root lacks privileges, such as CAP_SYS_RESOURCE. CRI-O
// gives privileged containers all capabilities that the kernel knows, and critical pods a score by
// which the kernel spares them when it is out of memory. runc fails if it has these not itself.
// containerd looks at what it has itself.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "crio-runc:", err)
		os.Exit(1)
	}
}

// run becomes the runc that is beside this program.
func run() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if bundle := valueOf("--bundle"); bundle != "" && slices.Contains(os.Args, "create") {
		err = restrict(filepath.Join(bundle, "config.json"))
	} else if file := valueOf("--process"); file != "" && slices.Contains(os.Args, "exec") {
		err = restrict(file)
	}
	if err != nil {
		return err
	}
	return syscall.Exec(filepath.Join(filepath.Dir(self), "runc"), os.Args, os.Environ())
}

// valueOf returns the argument after a flag, "" if there is none.
func valueOf(flag string) string {
	if i := slices.Index(os.Args, flag); i >= 0 && i+1 < len(os.Args) {
		return os.Args[i+1]
	}
	return ""
}

// restrict takes from a process what this one hasn't. The file is an OCI configuration, or the part
// of it about the process.
func restrict(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	config := map[string]any{}
	if err := decoder.Decode(&config); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	process, found := config["process"].(map[string]any)
	if !found {
		process = config
	}
	own, err := readOwn()
	if err != nil {
		return err
	}
	own.restrict(process)
	if text, err = json.Marshal(config); err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o644)
}

// privileges are those of this process.
type privileges struct {
	capabilities uint64
	score        int64
}

func readOwn() (privileges, error) {
	var own privileges
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return own, err
	}
	for line := range strings.Lines(string(status)) {
		if text, found := strings.CutPrefix(line, "CapBnd:"); found {
			if own.capabilities, err = strconv.ParseUint(strings.TrimSpace(text), 16, 64); err != nil {
				return own, err
			}
		}
	}
	score, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		return own, err
	}
	own.score, err = strconv.ParseInt(strings.TrimSpace(string(score)), 10, 64)
	return own, err
}

const sysResource = 24

func (own privileges) restrict(process map[string]any) {
	if own.capabilities&(1<<sysResource) != 0 {
		return
	}
	if score, ok := process["oomScoreAdj"].(json.Number); ok {
		if n, err := score.Int64(); err == nil && n < own.score {
			process["oomScoreAdj"] = own.score
		}
	}
	sets, _ := process["capabilities"].(map[string]any)
	for name, set := range sets {
		all, _ := set.([]any)
		sets[name] = slices.DeleteFunc(all, func(c any) bool { return c == "CAP_SYS_RESOURCE" })
	}
}
