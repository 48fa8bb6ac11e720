//go:build failpoints

package failpoint

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// FromEnvironment returns Steps that kill the process, as kill -9 does, after the step that
// the environment names, and write down all steps until then if the
// environment says where.
func FromEnvironment() *Steps {
	name, nth := target(os.Getenv(Variable))
	record := func(string) {}
	if path := os.Getenv(RecordVariable); path != "" {
		record = recorder(path)
	}
	var mu sync.Mutex
	seen := 0
	return Call(func(step string) {
		mu.Lock()
		defer mu.Unlock()
		record(step)
		if step != name {
			return
		}
		if seen++; seen == nth {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {} // the signal is on its way
		}
	})
}

// target reads "step" or "step#2".
func target(variable string) (name string, nth int) {
	name, times, _ := strings.Cut(variable, "#")
	if nth, err := strconv.Atoi(times); err == nil {
		return name, nth
	}
	return name, 1
}

// recorder appends lines to a file that others may append to as well.
func recorder(path string) func(string) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		panic(fmt.Sprintf("%s: %v", RecordVariable, err))
	}
	return func(step string) {
		if _, err := f.WriteString(step + "\n"); err != nil {
			panic(fmt.Sprintf("%s: %v", RecordVariable, err))
		}
	}
}
