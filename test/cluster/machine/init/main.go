// Command init is pid 1 of a machine of a local cluster; see package machine.
// It is started by test/cluster, never by hand.
package main

import (
	"fmt"
	"os"

	"github.com/tessera-dra/tessera/test/cluster/machine"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: init STATE-DIR (started by localcluster; see localcluster --help)")
		os.Exit(2)
	}
	if err := machine.Run(os.Args[1]); err != nil { //nolint:staticcheck // it returns only when it fails
		fmt.Fprintln(os.Stderr, "init:", err)
		os.Exit(1)
	}
}
