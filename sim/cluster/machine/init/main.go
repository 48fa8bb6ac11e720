// Command init is pid 1 of a machine of a local cluster; see package machine.
// It is started by sim/cluster, never by hand. Pid 1 starts it again for components that
// see only a part of the machine.
package main

import (
	"fmt"
	"os"

	"github.com/tessera-dra/tessera/sim/cluster/machine"
)

func main() {
	if err := machine.Main(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "init:", err)
		os.Exit(1)
	}
}
