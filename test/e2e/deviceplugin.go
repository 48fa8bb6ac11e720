//go:build e2e

package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/tessera-dra/tessera/sim/cluster"
	"github.com/tessera-dra/tessera/test/stack"
)

// devicePlugin runs a device plugin on a node until the story ends, or ends the one
// that runs there.
//
//	deviceplugin NODE [RESOURCE COUNT]
func devicePlugin(ts *testscript.TestScript, s *stack.Stack, neg bool, args []string) {
	if neg || len(args) != 1 && len(args) != 3 {
		ts.Fatalf("usage: deviceplugin NODE [RESOURCE COUNT]")
	}
	node := args[0]
	end := func() error {
		_, err := s.Cluster.Exec(context.Background(), node, "sh", "-c", `for p in /proc/[0-9]*; do
  [ "$(cat $p/comm 2>/dev/null)" = deviceplugin ] && kill "${p#/proc/}"
done; true`)
		return err
	}
	if len(args) == 1 {
		ts.Check(end())
		return
	}
	program := filepath.Join(ts.Getenv("WORK"), "deviceplugin")
	build := exec.Command("go", "build", "-o", program, "../../sim/cmd/deviceplugin")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	build.Stderr = ts.Stderr()
	ts.Check(build.Run())
	file, err := os.Open(program)
	ts.Check(err)
	defer file.Close()
	ts.Defer(func() {
		if err := end(); err != nil {
			ts.Logf("the story leaves its device plugin behind: %v", err)
		}
	})
	const start = `cat > /run/deviceplugin && chmod +x /run/deviceplugin && { setsid /run/deviceplugin "$@" < /dev/null > /run/deviceplugin.log 2>&1 & }`
	ts.Check(s.Cluster.Run(context.Background(), node, cluster.Stdio{In: file, Out: ts.Stdout(), Err: ts.Stderr()},
		"sh", "-c", start, "sh", args[1], args[2]))
}
