package node

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/doctor"
	"github.com/tessera-dra/tessera/pkg/node/driver"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// is wants the GPU's compute mode and time slice to be these.
func (d *divided) is(t *testing.T, n int, mode nvml.ComputeMode, interval string) {
	t.Helper()
	root, session := d.another(t)
	hw, err := doctor.ReadHardware(d.ctx, session, sharing.SMI(driver.SMI(d.host, root)))
	if err != nil {
		t.Fatal(err)
	}
	uuid := gpu.UUID(installed.Machine.GPUs[n].UUID)
	if got := hw.ComputeModes[uuid]; got != mode {
		t.Errorf("compute mode of GPU %d: got %s, want %s", n, got, mode)
	}
	if got := hw.TimeSlices[uuid]; got != interval {
		t.Errorf("time slice of GPU %d: got %s, want %s", n, got, interval)
	}
}

// TestSharesOfAGPU has four claims share a GPU, a fifth wait for them to have it
// whole, and all of it as it was afterwards.
func TestSharesOfAGPU(t *testing.T) {
	d, end := startDivided(t)
	one := installed.Names()[0]
	var claims []*resourceapi.ResourceClaim
	for n := range 4 {
		c := claimOf(fmt.Sprintf("share-%d", n), one+gpu.DeviceName(fmt.Sprintf("-mps4-%d", n)))
		claims = append(claims, c)
		if _, err := d.preparer.Prepare(d.ctx, c); err != nil {
			t.Fatalf("prepare %s: %v", c.Name, err)
		}
	}
	d.is(t, 0, nvml.ComputeExclusiveProcess, "Default")
	d.checkWithDoctor(t)
	whole := claimOf("whole", one)
	prepared := make(chan error, 1)
	go func() {
		_, err := d.preparer.Prepare(d.ctx, whole)
		prepared <- err
	}()
	for _, c := range claims {
		if err := d.unprepare(c); err != nil {
			t.Errorf("unprepare %s: %v", c.Name, err)
		}
	}
	if err := <-prepared; err != nil {
		t.Errorf("prepare the whole GPU: %v", err)
	}
	d.is(t, 0, nvml.ComputeDefault, "Default")
	d.checkWithDoctor(t)
	if err := d.unprepare(whole); err != nil {
		t.Error(err)
	}
	end()
	d.checkWithDoctor(t)
}

// TestTimeSlices are a policy's, put back with the last claim.
func TestTimeSlices(t *testing.T) {
	d, _ := startDivided(t)
	d.sharing.SetTimeSlices(map[gpu.UUID]string{gpu.UUID(installed.Machine.GPUs[1].UUID): "Long"})
	one := installed.Names()[1]
	a, b := claimOf("a", one+"-ts4-0"), claimOf("b", one+"-ts4-3")
	for _, c := range []*resourceapi.ResourceClaim{a, b} {
		if _, err := d.preparer.Prepare(d.ctx, c); err != nil {
			t.Fatal(err)
		}
	}
	d.is(t, 1, nvml.ComputeDefault, "Long")
	d.checkWithDoctor(t)
	for i, c := range []*resourceapi.ResourceClaim{a, b} {
		if err := d.unprepare(c); err != nil {
			t.Error(err)
		}
		d.is(t, 1, nvml.ComputeDefault, []string{"Long", "Default"}[i])
	}
	d.checkWithDoctor(t)
}

// TestSharingOfManyClaims has claims of all kinds come and go at once, each
// waiting for those it can't be beside. It seeds itself and says how.
func TestSharingOfManyClaims(t *testing.T) {
	d, end := startDivided(t)
	d.sharing.SetTimeSlices(map[gpu.UUID]string{gpu.UUID(installed.Machine.GPUs[0].UUID): "Short"})
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	var wg sync.WaitGroup
	for n := range 8 {
		random := rand.New(rand.NewPCG(seed, uint64(n)))
		wg.Go(func() {
			for i := range 6 {
				one := installed.Names()[random.IntN(2)]
				device := one + []gpu.DeviceName{
					"", "-mig-3g40gb-0", "-mig-1g10gb-6", "-mps2-0", "-mps2-1", "-ts3-0", "-ts3-2", "-mig-3g40gb-0-mps2-0", "-mig-3g40gb-0-mps2-1", "-mig-3g40gb-4-mps2-1",
				}[random.IntN(10)]
				c := claimOf(fmt.Sprintf("claim-%d-%d", n, i), device)
				if _, err := d.preparer.Prepare(d.ctx, c); err != nil {
					t.Errorf("prepare %v: %v", device, err)
				}
				if err := d.unprepare(c); err != nil {
					t.Errorf("unprepare %v: %v", device, err)
				}
			}
		})
	}
	wg.Wait()
	end()
	d.checkWithDoctor(t)
	d.is(t, 0, nvml.ComputeDefault, "Default")
	d.is(t, 1, nvml.ComputeDefault, "Default")
}

// TestNoSupervisor says where to look, and leaves nothing behind.
func TestNoSupervisor(t *testing.T) {
	d, end := startDivided(t)
	d.daemons.SetAway(true)
	c := claimOf("share", installed.Names()[0]+"-mps4-1")
	if _, err := d.preparer.Prepare(d.ctx, c); !errors.Is(err, mps.ErrUnavailable) {
		t.Errorf("got %v", err)
	}
	d.checkWithDoctor(t)
	d.daemons.SetAway(false)
	if _, err := d.preparer.Prepare(d.ctx, c); err != nil {
		t.Error(err)
	}
	if err := d.unprepare(c); err != nil {
		t.Error(err)
	}
	end()
	d.checkWithDoctor(t)
}
