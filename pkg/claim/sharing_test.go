package claim_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tessera-dra/tessera/api/resource/v1beta1"
	"github.com/tessera-dra/tessera/pkg/claim"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// One device of each kind.
const (
	whole          = "gpu-0"
	share          = "gpu-0-mps4-1"
	consumable     = "gpu-0-mps"
	partitionShare = "gpu-0-mig-1g10gb-4-mps2-0"
	replica        = "gpu-0-ts4-1"
)

const (
	mpsLimits = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS","mpsConfig":{
		"defaultActiveThreadPercentage":50,"defaultPinnedDeviceMemoryLimit":"10Gi","defaultPerDevicePinnedMemoryLimit":{"0":"1537Ki"},"multiUser":false}}}`
	mpsOther    = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":40}}}`
	sliced      = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing"}}`
	migLimits   = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig","sharing":{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":"1Gi"}}}`
	mpsEmpty    = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS","mpsConfig":{}}}`
	nothingSaid = ""
)

// TestSharingByKind reads each configuration for each kind of device, from the
// class, from the claim for all requests, and from the claim for the one.
func TestSharingByKind(t *testing.T) {
	limits := claim.MPS{ThreadPercentage: 50, MemoryMiB: 10240, PerDevice: map[string]int64{"0": 1}}
	type outcome struct {
		mps       *claim.MPS // without its source
		timeSlice v1beta1.TimeSliceInterval
		nothing   bool   // the strategy has no effect
		refused   string // a part of the error
		passed    bool   // over, where it isn't addressed
	}
	for parameters, kinds := range map[string]map[string]outcome{
		nothingSaid: {whole: {}, partition: {}, share: {}, consumable: {}, partitionShare: {}, replica: {}},
		plain:       {whole: {}, share: {}, consumable: {}, partitionShare: {}, replica: {}, partition: {refused: "use MigDeviceConfig", passed: true}},
		plainMIG: {
			partition: {}, partitionShare: {}, whole: {refused: "a whole GPU: use GpuConfig", passed: true}, share: {refused: "an MPS share of a GPU: use GpuConfig", passed: true},
			consumable: {refused: "use GpuConfig", passed: true}, replica: {refused: "a time-sliced replica of a GPU: use GpuConfig", passed: true},
		},
		mps: {
			whole: {mps: &claim.MPS{}}, share: {mps: &claim.MPS{}}, consumable: {mps: &claim.MPS{}}, partitionShare: {mps: &claim.MPS{}},
			replica: {refused: "ask for an MPS share (DeviceClass mps.gpu.nvidia.com)"}, partition: {refused: "use MigDeviceConfig", passed: true},
		},
		mpsLimits: {
			whole: {mps: &limits}, share: {mps: &limits}, consumable: {mps: &limits}, partitionShare: {mps: &limits},
			replica: {refused: "sharing.strategy MPS isn't for device"}, partition: {refused: "use MigDeviceConfig", passed: true},
		},
		mpsEmpty: {
			whole: {mps: &claim.MPS{}}, share: {mps: &claim.MPS{}}, consumable: {mps: &claim.MPS{}}, partitionShare: {mps: &claim.MPS{}},
			replica: {refused: "sharing.strategy MPS isn't for device"}, partition: {refused: "use MigDeviceConfig", passed: true},
		},
		slicedMIG: {
			partition: {nothing: true}, partitionShare: {nothing: true},
			whole: {refused: "use GpuConfig", passed: true}, share: {refused: "use GpuConfig", passed: true},
			consumable: {refused: "use GpuConfig", passed: true}, replica: {refused: "use GpuConfig", passed: true},
		},
		vfio: {
			partition: {refused: "use MigDeviceConfig", passed: true}, partitionShare: {refused: "use MigDeviceConfig", passed: true},
			whole: {refused: "use GpuConfig", passed: true}, share: {refused: "use GpuConfig", passed: true},
			consumable: {refused: "use GpuConfig", passed: true}, replica: {refused: "use GpuConfig", passed: true},
		},
		migLimits: {
			partition: {mps: &claim.MPS{MemoryMiB: 1024}}, partitionShare: {mps: &claim.MPS{MemoryMiB: 1024}},
			whole: {refused: "use GpuConfig", passed: true}, share: {refused: "use GpuConfig", passed: true},
			consumable: {refused: "use GpuConfig", passed: true}, replica: {refused: "use GpuConfig", passed: true},
		},
		sliced: {
			whole: {timeSlice: v1beta1.DefaultTimeSlice}, share: {refused: "ask for a whole GPU"}, consumable: {refused: "ask for a whole GPU"},
			partitionShare: {refused: "it is an MPS share"}, replica: {refused: "set the interval in the SharingPolicy"}, partition: {refused: "use MigDeviceConfig", passed: true},
		},
		timeSliced: {
			whole: {timeSlice: v1beta1.LongTimeSlice}, share: {refused: "leave sharing out"}, consumable: {refused: "leave sharing out"},
			partitionShare: {refused: "leave sharing out"}, replica: {refused: "leave sharing out"}, partition: {refused: "use MigDeviceConfig", passed: true},
		},
	} {
		for device, want := range kinds {
			for how, c := range map[string]resourceapi.DeviceAllocationConfiguration{
				"class, addressed": config(fromClass, driver, parameters, "r"), "claim": config(fromClaim, driver, parameters), "claim, addressed": config(fromClaim, driver, parameters, "r"),
			} {
				t.Run(parameters+"/"+device+"/"+how, func(t *testing.T) {
					configs := []resourceapi.DeviceAllocationConfiguration{c}
					if parameters == nothingSaid {
						configs = nil
					}
					got, err := claim.Read(allocated([]resourceapi.DeviceRequestAllocationResult{result("r/sub", device)}, configs...), driver, pool)
					if passedOver := want.passed && len(c.Requests) == 0; want.refused != "" && !passedOver {
						checkRefused(t, err, want.refused, `request "r/sub"`)
						return
					}
					if err != nil {
						t.Fatal(err)
					}
					wanted := claim.Grant{Request: "r/sub", Device: gpu.DeviceName(device), TimeSlice: want.timeSlice, Ineffective: want.nothing}
					if want.mps != nil {
						mps := *want.mps
						mps.Source = c.Source
						wanted.MPS = &mps
					}
					if diff := cmp.Diff([]claim.Grant{wanted}, got); diff != "" {
						t.Errorf("-want +got:\n%s", diff)
					}
				})
			}
		}
	}
}

func checkRefused(t *testing.T, err error, says ...string) {
	t.Helper()
	if !errors.Is(err, claim.ErrPermanent) {
		t.Fatalf("got %v, want a refusal", err)
	}
	for _, s := range says {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("got %q, want it to say %q", err, s)
		}
	}
}

// TestSharingPrecedence checks that a claim's configuration replaces the class's as a whole,
// a later one an earlier one, and that the name of a request includes its alternatives.
func TestSharingPrecedence(t *testing.T) {
	type configs = []resourceapi.DeviceAllocationConfiguration
	short := strings.Replace(timeSliced, "Long", "Short", 1)
	for name, tc := range map[string]struct {
		device  string
		configs configs
		want    claim.Grant
	}{
		"claim over class":                {whole, configs{config(fromClaim, driver, short), config(fromClass, driver, mps)}, claim.Grant{TimeSlice: "Short"}},
		"the later of the claim":          {whole, configs{config(fromClaim, driver, short), config(fromClaim, driver, timeSliced)}, claim.Grant{TimeSlice: "Long"}},
		"without sharing takes back":      {whole, configs{config(fromClass, driver, mps), config(fromClaim, driver, plain)}, claim.Grant{}},
		"main request":                    {whole, configs{config(fromClaim, driver, short, "r")}, claim.Grant{TimeSlice: "Short"}},
		"this alternative":                {whole, configs{config(fromClaim, driver, short, "r/sub")}, claim.Grant{TimeSlice: "Short"}},
		"another alternative":             {whole, configs{config(fromClaim, driver, short, "r/other")}, claim.Grant{}},
		"another driver's":                {whole, configs{config(fromClaim, "nic.example.com", "[]")}, claim.Grant{}},
		"limits don't add up":             {whole, configs{config(fromClass, driver, mpsLimits), config(fromClaim, driver, mpsOther)}, claim.Grant{MPS: &claim.MPS{ThreadPercentage: 40, Source: fromClaim}}},
		"MIG's wins on a partition share": {partitionShare, configs{config(fromClass, driver, mpsOther), config(fromClaim, driver, migLimits)}, claim.Grant{MPS: &claim.MPS{MemoryMiB: 1024, Source: fromClaim}}},
		"time-slicing takes MPS back":     {partition, configs{config(fromClass, driver, migLimits), config(fromClaim, driver, slicedMIG)}, claim.Grant{Ineffective: true}},
		"of the wrong kind, in between":   {partition, configs{config(fromClass, driver, migLimits), config(fromClaim, driver, sliced)}, claim.Grant{MPS: &claim.MPS{MemoryMiB: 1024, Source: fromClass}}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := claim.Read(allocated([]resourceapi.DeviceRequestAllocationResult{result("r/sub", tc.device)}, tc.configs...), driver, pool)
			if err != nil {
				t.Fatal(err)
			}
			tc.want.Request, tc.want.Device = "r/sub", gpu.DeviceName(tc.device)
			if diff := cmp.Diff([]claim.Grant{tc.want}, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// TestConfigurationThatMeansAnother isn't refused for the devices that it can't
// mean, if it is for all requests.
func TestConfigurationThatMeansAnother(t *testing.T) {
	results := []resourceapi.DeviceRequestAllocationResult{result("gpu", whole), result("share", share), result("replica", "gpu-1-ts2-0")}
	got, err := claim.Read(allocated(results, config(fromClaim, driver, timeSliced)), driver, pool)
	if err != nil {
		t.Fatal(err)
	}
	if got[0].TimeSlice != v1beta1.LongTimeSlice || got[1].TimeSlice != "" || got[2].TimeSlice != "" {
		t.Errorf("got %+v", got)
	}
	if got, err = claim.Read(allocated(results[1:], config(fromClaim, driver, mpsLimits)), driver, pool); err != nil || got[0].MPS == nil || got[1].MPS != nil {
		t.Errorf("got %+v, %v", got, err)
	}
	_, err = claim.Read(allocated(results[1:], config(fromClaim, driver, timeSliced)), driver, pool)
	checkRefused(t, err, `"share"`, share)
	_, err = claim.Read(allocated(results, config(fromClaim, driver, timeSliced, "replica")), driver, pool)
	checkRefused(t, err, `"replica"`)
}

func TestOneClaimOneDaemon(t *testing.T) {
	type results = []resourceapi.DeviceRequestAllocationResult
	other := "gpu-1-mig-1g10gb-0"
	for name, tc := range map[string]struct {
		results results
		configs []resourceapi.DeviceAllocationConfiguration
		says    []string // empty: it can be
	}{
		"all GPUs":                         {results{result("a", "gpu-0"), result("b", "gpu-1")}, []resourceapi.DeviceAllocationConfiguration{config(fromClaim, driver, mpsLimits)}, nil},
		"the same twice":                   {results{result("a", "gpu-0"), result("b", "gpu-1")}, []resourceapi.DeviceAllocationConfiguration{config(fromClaim, driver, mpsLimits, "a"), config(fromClaim, driver, mpsLimits, "b")}, nil},
		"one with, one without":            {results{result("a", "gpu-0"), result("b", "gpu-1")}, []resourceapi.DeviceAllocationConfiguration{config(fromClaim, driver, mps, "a")}, nil},
		"one partition":                    {results{result("a", partition), result("b", other)}, []resourceapi.DeviceAllocationConfiguration{config(fromClaim, driver, mig, "a")}, nil},
		"shares have daemons of their own": {results{result("a", share), result("b", "gpu-1-mps2-0")}, []resourceapi.DeviceAllocationConfiguration{config(fromClaim, driver, mpsLimits, "a"), config(fromClaim, driver, mpsOther, "b")}, nil},
		"different ones": {
			results{result("a", "gpu-0"), result("b", "gpu-1")}, []resourceapi.DeviceAllocationConfiguration{config(fromClaim, driver, mps, "a"), config(fromClaim, driver, mpsOther, "b")},
			[]string{`"a"`, `"b"`, "use two claims"},
		},
		"two partitions": {
			results{result("a", partition), result("b", other)}, []resourceapi.DeviceAllocationConfiguration{config(fromClaim, driver, mig)},
			[]string{partition, other, "one MIG device", "use a claim for each"},
		},
		"a GPU and a partition": {
			results{result("a", partition), result("b", "gpu-1")}, []resourceapi.DeviceAllocationConfiguration{config(fromClaim, driver, mig), config(fromClaim, driver, mps)},
			[]string{"use a claim for each"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := claim.Read(allocated(tc.results, tc.configs...), driver, pool)
			if tc.says != nil {
				checkRefused(t, err, tc.says...)
			} else if err != nil {
				t.Error(err)
			}
		})
	}
}

func TestConsumedCapacity(t *testing.T) {
	consumed := func(device, id string, capacity map[resourceapi.QualifiedName]resource.Quantity) resourceapi.DeviceRequestAllocationResult {
		return with(result("r", device), func(r *resourceapi.DeviceRequestAllocationResult) {
			r.ShareID, r.ConsumedCapacity = new(types.UID(id)), capacity
		})
	}
	capacity := func(pairs ...string) map[resourceapi.QualifiedName]resource.Quantity {
		c := map[resourceapi.QualifiedName]resource.Quantity{}
		for i := 0; i < len(pairs); i += 2 {
			c[resourceapi.QualifiedName(pairs[i])] = resource.MustParse(pairs[i+1])
		}
		return c
	}
	for name, tc := range map[string]struct {
		capacity map[resourceapi.QualifiedName]resource.Quantity
		want     gpu.Limits
	}{
		"all":                     {capacity("memory", "10Gi", "threadPercentage", "25", "clients", "1"), gpu.Limits{ThreadPercentage: 25, MemoryMiB: 10240}},
		"with the driver's name":  {capacity(driver+"/memory", "10Gi", driver+"/threadPercentage", "100"), gpu.Limits{ThreadPercentage: 100, MemoryMiB: 10240}},
		"rounded down":            {capacity("memory", "5000000"), gpu.Limits{MemoryMiB: 4}},
		"another driver's":        {capacity("example.com/memory", "10Gi"), gpu.Limits{}},
		"none (before 1.34)":      {nil, gpu.Limits{}},
		"more threads than there": {capacity("memory", "1Gi", "threadPercentage", "400"), gpu.Limits{ThreadPercentage: 100, MemoryMiB: 1024}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := claim.Read(allocated([]resourceapi.DeviceRequestAllocationResult{consumed(consumable, "s1", tc.capacity)}), driver, pool)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]claim.Grant{{Request: "r", Device: consumable, ShareID: "s1", Consumed: tc.want}}, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
	t.Run("several of one device", func(t *testing.T) {
		got, err := claim.Read(allocated([]resourceapi.DeviceRequestAllocationResult{
			consumed(consumable, "s1", capacity("memory", "1Gi")), consumed(consumable, "s2", capacity("memory", "2Gi")),
		}), driver, pool)
		if err != nil || len(got) != 2 || got[0].Consumed.MemoryMiB != 1024 || got[1].Consumed.MemoryMiB != 2048 {
			t.Errorf("got %+v, %v", got, err)
		}
	})
	t.Run("too little", func(t *testing.T) {
		_, err := claim.Read(allocated([]resourceapi.DeviceRequestAllocationResult{consumed(consumable, "s1", capacity("memory", "1000"))}), driver, pool)
		checkRefused(t, err, consumable, "1k", "at least 1Mi")
	})
	t.Run("of a whole GPU: nothing", func(t *testing.T) {
		got, err := claim.Read(allocated([]resourceapi.DeviceRequestAllocationResult{consumed(whole, "s1", capacity("memory", "1Gi"))}), driver, pool)
		if err != nil || got[0].Consumed != (gpu.Limits{}) {
			t.Errorf("got %+v, %v", got, err)
		}
	})
}

// TestAdminHasNoPartInSharing, but what it can't read is refused.
func TestAdminHasNoPartInSharing(t *testing.T) {
	look := with(result("look", consumable), func(r *resourceapi.DeviceRequestAllocationResult) {
		r.AdminAccess, r.ConsumedCapacity = new(true), map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("0")}
	})
	got, err := claim.Read(allocated([]resourceapi.DeviceRequestAllocationResult{look}, config(fromClaim, driver, mpsLimits)), driver, pool)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]claim.Grant{{Request: "look", Device: consumable, Admin: true}}, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	_, err = claim.Read(allocated([]resourceapi.DeviceRequestAllocationResult{look}, config(fromClaim, driver, misspelt)), driver, pool)
	checkRefused(t, err, "sharign")
}
