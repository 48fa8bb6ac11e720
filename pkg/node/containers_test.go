package node

import (
	"context"
	"testing"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/node/containers"
)

// startContainers runs what waits for the ends of this machine's containers.
func startContainers(t *testing.T) *containers.Containers {
	t.Helper()
	c, err := containers.New(t.TempDir(), driverroot.NewHost("/"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return c
}
