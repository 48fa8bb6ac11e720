package nvml_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/pkg/nvml/nvmltest"
)

// initializing is a driver without the persistence daemon: it initializes a GPU with the
// first call for it, and one GPU at a time.
type initializing struct {
	gonvml.Interface
	busy  chan struct{}
	hangs int // the index of a GPU whose initialization doesn't end
	ended chan struct{}
}

func (l initializing) DeviceGetHandleByIndex(i int) (gonvml.Device, gonvml.Return) {
	if i == l.hangs {
		<-l.ended
		return l.Interface.DeviceGetHandleByIndex(i)
	}
	l.busy <- struct{}{}
	defer func() { <-l.busy }()
	time.Sleep(2 * time.Second)
	return l.Interface.DeviceGetHandleByIndex(i)
}

// TestGPUsInitializeInTurn checks that the time in which a GPU is waiting for others doesn't
// count, and that a GPU which never answers is still noticed.
func TestGPUsInitializeInTurn(t *testing.T) {
	m := nvmltest.NewSimulated(t, "16xl4").Machine
	for _, hangs := range []int{-1, 3} {
		t.Run(fmt.Sprintf("GPU %d hangs", hangs), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := initializing{nvmltest.Library(m), make(chan struct{}, 1), hangs, make(chan struct{})}
				s, err := nvml.NewOpener().Init(l, "simulated")
				if err != nil {
					t.Fatal(err)
				}
				got := listing(t, s)
				if want := 16 - min(hangs+1, 1); len(got.GPUs) != want || (hangs >= 0) != (got.Unidentified[3] != nil) {
					t.Errorf("%d GPUs are listed, want %d; unidentified are %v", len(got.GPUs), want, got.Unidentified)
				}
				for _, g := range got.GPUs {
					if len(g.Conditions) > 0 {
						t.Errorf("GPU %d has conditions %v", g.Index, g.Conditions)
					}
				}
				close(l.ended)
				synctest.Wait()
				if got := listing(t, s); len(got.GPUs) != 16 {
					t.Errorf("%d GPUs are listed when all answer; unidentified are %v", len(got.GPUs), got.Unidentified)
				}
			})
		})
	}
}
