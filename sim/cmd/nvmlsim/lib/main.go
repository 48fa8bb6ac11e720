// Command lib builds the simulator's libnvidia-ml.so.1:
//
//	go run ./sim/cmd/nvmlsim/lib bin/libnvidia-ml.so.1
//
// It needs a C compiler, and no cgo.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/tessera-dra/tessera/sim/nvmlsim/library"
)

func main() {
	err := errors.New("usage: lib FILE")
	if len(os.Args) == 2 {
		err = library.Build(context.Background(), os.Args[1])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "lib:", err)
		os.Exit(1)
	}
}
