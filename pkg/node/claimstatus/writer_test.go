package claimstatus

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"
	testingclock "k8s.io/utils/clock/testing"

	"github.com/tessera-dra/tessera/pkg/clocktest"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// server is an API server with one ResourceClaim, in one version of the API.
type server struct {
	version string
	drops   bool // the server doesn't store status.devices

	mu      sync.Mutex
	claim   *resourceapi.ResourceClaim
	refuses []int    // the answers to the next writes
	written []string // bodies of writes
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	path := "/apis/resource.k8s.io/" + s.version + "/namespaces/default/resourceclaims/training"
	switch {
	case r.Method == http.MethodGet && r.URL.Path == path && s.claim != nil:
		s.answer(w)
	case r.Method == http.MethodPatch && r.URL.Path == path+"/status" && s.claim != nil:
		s.patch(w, r)
	default:
		fail(w, http.StatusNotFound)
	}
}

func (s *server) patch(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	s.written = append(s.written, r.Header.Get("Content-Type")+" "+r.URL.RawQuery+" "+string(body))
	if len(s.refuses) > 0 {
		code := s.refuses[0]
		s.refuses = s.refuses[1:]
		fail(w, code)
		return
	}
	var applied resourceapi.ResourceClaim
	if err := json.Unmarshal(body, &applied); err != nil {
		fail(w, http.StatusBadRequest)
		return
	}
	if !s.drops {
		s.claim.Status.Devices = applied.Status.Devices
	}
	s.answer(w)
}

func (s *server) answer(w http.ResponseWriter) {
	c := s.claim.DeepCopy()
	c.APIVersion, c.Kind = "resource.k8s.io/"+s.version, "ResourceClaim"
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(c)
}

func fail(w http.ResponseWriter, code int) {
	reasons := map[int]metav1.StatusReason{
		http.StatusNotFound: metav1.StatusReasonNotFound, http.StatusForbidden: metav1.StatusReasonForbidden,
		http.StatusInternalServerError: metav1.StatusReasonInternalError,
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(metav1.Status{Status: metav1.StatusFailure, Reason: reasons[code], Code: int32(code)})
}

const (
	parent = gpu.UUID("GPU-980fb007-8a10-0135-bada-13f71feaef21")
	device = gpu.DeviceName("gpu-980fb007-mig-1g18gb-4")
)

// part is the partition of partition.
var part = gpu.Partition{GPU: parent, Profile: "1g.18gb", Placement: gpu.Placement{Start: 4, Size: 1}}

// partition is a claim with a partition and a whole GPU.
func partition() holding.Realized {
	made := record(holding.New(device, part), holding.New("gpu-11111111", gpu.Whole{GPU: "GPU-11111111-8a10-0135-bada-13f71feaef21"}))
	made.Instances[part] = gpu.Instance{
		UUID: "MIG-4ca0a4a9-9d0a-5a4e-8e4f-7b3cd8a2f3a1", Profile: "1g.18gb", Placement: gpu.Placement{Start: 4, Size: 1}, GPUInstanceID: 9,
	}
	return made
}

// record is the claim with these devices.
func record(holdings ...holding.Holding) holding.Realized {
	return holding.Realized{
		Record:    holding.Record{ClaimUID: "uid-1", Namespace: "default", Name: "training", Holdings: holdings},
		Instances: map[gpu.Partition]gpu.Instance{},
	}
}

func claimed() *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "training", UID: "uid-1"},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{
				{Request: "part", Driver: "gpu.nvidia.com", Pool: "node-a", Device: string(device)},
				{Request: "gpu", Driver: "gpu.nvidia.com", Pool: "node-a", Device: "gpu-11111111"},
			},
		}}},
	}
}

// start runs a Writer against the server until the test ends.
func start(t *testing.T, s *server) *Writer {
	t.Helper()
	return startAt(t, s, clock.RealClock{})
}

func startAt(t *testing.T, s *server, clock clock.WithTicker) *Writer {
	t.Helper()
	http := httptest.NewServer(s)
	t.Cleanup(http.Close)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: http.URL, QPS: -1})
	if err != nil {
		t.Fatal(err)
	}
	w := newWriter(client, "gpu.nvidia.com", "node-a", clock)
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return w
}

// idle waits until the Writer has no more work.
func idle(t *testing.T, w *Writer) {
	t.Helper()
	for range 6000 {
		left := false
		w.pending.Range(func(any, any) bool { left = true; return false })
		if !left {
			return
		}
		<-time.After(10 * time.Millisecond)
	}
	t.Fatal("it never becomes idle")
}

func TestStatusTellsWhichMIGDeviceAPartitionIs(t *testing.T) {
	for _, version := range []string{"v1", "v1beta2", "v1beta1"} {
		t.Run(version, func(t *testing.T) {
			s := &server{version: version, claim: claimed()}
			w := start(t, s)
			for range 2 { // the second time, the status is already correct
				w.Enqueue(partition())
				idle(t, w)
			}
			want := []string{`application/apply-patch+yaml fieldManager=tessera-kubelet-plugin&force=true ` +
				`{"apiVersion":"resource.k8s.io/` + version + `","kind":"ResourceClaim",` +
				`"metadata":{"name":"training","namespace":"default","uid":"uid-1"},` +
				`"status":{"devices":[{"driver":"gpu.nvidia.com","pool":"node-a","device":"gpu-980fb007-mig-1g18gb-4","data":{` +
				`"uuid":"MIG-4ca0a4a9-9d0a-5a4e-8e4f-7b3cd8a2f3a1","parentUUID":"GPU-980fb007-8a10-0135-bada-13f71feaef21",` +
				`"profile":"1g.18gb","placement":{"start":4,"size":1},"gpuInstanceID":9,"computeInstanceID":0}}]}}`}
			if diff := cmp.Diff(want, s.written); diff != "" {
				t.Errorf("writes (-want +got):\n%s", diff)
			}
			again := partition()
			instance := again.Instances[part]
			instance.GPUInstanceID = 7
			again.Instances[part] = instance
			w.Enqueue(again)
			idle(t, w)
			if len(s.written) != 2 || !strings.Contains(s.written[1], `"gpuInstanceID":7`) {
				t.Errorf("after it was made again: %v", s.written)
			}
		})
	}
}

func TestNothingIsWritten(t *testing.T) {
	for name, tc := range map[string]struct {
		claim   func() *resourceapi.ResourceClaim
		devices func() holding.Realized
	}{
		"of whole GPUs": {claimed, func() holding.Realized {
			made := partition()
			made.Holdings = made.Holdings[1:]
			return made
		}},
		"to a claim that is gone": {func() *resourceapi.ResourceClaim { return nil }, partition},
		"to another claim of the name": {func() *resourceapi.ResourceClaim {
			c := claimed()
			c.UID = "uid-2"
			return c
		}, partition},
		"to a claim that was deallocated": {func() *resourceapi.ResourceClaim {
			c := claimed()
			c.Status.Allocation = nil
			return c
		}, partition},
	} {
		t.Run(name, func(t *testing.T) {
			s := &server{version: "v1", claim: tc.claim()}
			w := start(t, s)
			w.Enqueue(tc.devices())
			idle(t, w)
			if len(s.written) > 0 {
				t.Errorf("written: %v", s.written)
			}
		})
	}
}

func TestFailures(t *testing.T) {
	for name, tc := range map[string]struct {
		refuses []int
		writes  int
		stored  bool
	}{
		"a server in trouble is asked again": {[]int{http.StatusInternalServerError}, 2, true},
		"what is forbidden is left alone":    {[]int{http.StatusForbidden}, 1, false},
		"a claim that goes meanwhile":        {[]int{http.StatusNotFound}, 1, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := &server{version: "v1", claim: claimed(), refuses: tc.refuses}
			w := start(t, s)
			w.Enqueue(partition())
			idle(t, w)
			if stored := len(s.claim.Status.Devices) > 0; len(s.written) != tc.writes || stored != tc.stored {
				t.Errorf("%d writes, stored: %v", len(s.written), stored)
			}
		})
	}
}

// TestServerWithoutTheFieldAndASetClock: statuses wait as long as they should, however the
// clock is set meanwhile.
func TestServerWithoutTheFieldAndASetClock(t *testing.T) {
	for _, by := range []time.Duration{3 * time.Hour, -3 * time.Hour} {
		c := &clocktest.Clock{}
		w := &Writer{clock: c}
		w.pauseWrites()
		c.Shift(by)
		if got := w.retryIn(); got > notStoredFor || got < notStoredFor-time.Minute {
			t.Errorf("the clock was set by %v: statuses wait for another %v, want %v", by, got, notStoredFor)
		}
	}
}

// TestServerWithoutTheField checks that one write shows that the server doesn't store
// the field, and that claims which were prepared meanwhile get their status when it
// does, unless they are gone.
func TestServerWithoutTheField(t *testing.T) {
	for name, gone := range map[string]bool{"the claim is still there": false, "the claim is gone": true} {
		t.Run(name, func(t *testing.T) {
			s := &server{version: "v1", claim: claimed(), drops: true}
			clock := testingclock.NewFakeClock(time.Unix(1000, 0))
			w := startAt(t, s, clock)
			w.Enqueue(partition())
			for w.notStoredUntil.Load() == nil { // until the answer to the first write has been read
				<-time.After(time.Millisecond)
			}
			w.Enqueue(partition())
			s.mu.Lock()
			s.drops = false // it is upgraded
			if gone {
				s.claim = nil
			}
			s.mu.Unlock()
			clock.Step(notStoredFor)
			idle(t, w)
			if gone {
				return
			}
			if len(s.written) != 2 || len(s.claim.Status.Devices) == 0 {
				t.Errorf("%d writes, want one that shows that there is no use, and one later; devices %v", len(s.written), s.claim.Status.Devices)
			}
		})
	}
}
