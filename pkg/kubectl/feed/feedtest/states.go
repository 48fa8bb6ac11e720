package feedtest

import (
	"fmt"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/test/allocators"
)

func exclusive(int) v1alpha1.Plan   { return v1alpha1.Plan{Exclusive: &v1alpha1.ExclusivePlan{}} }
func partitioned(int) v1alpha1.Plan { return v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{}} }

// sharedFrom has MPS shares by size on GPUs from the n-th, and time slices on the last
// of four.
func sharedFrom(n int) func(int) v1alpha1.Plan {
	step := resource.MustParse("1Gi")
	return func(i int) v1alpha1.Plan {
		switch {
		case i < n:
			return partitioned(i)
		case i%4 == 3:
			return v1alpha1.Plan{TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 4}}
		default:
			return v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{MemoryStep: &step}}}
		}
	}
}

func pool(name string) map[string]string { return map[string]string{"karpenter.sh/nodepool": name} }

func mig(profile string) allocators.Request {
	return allocators.Request{Kind: "mig", Profile: profile}
}

func share(memory string) allocators.Request {
	return allocators.Request{Kind: "mps", Capacity: map[resourceapi.QualifiedName]string{"memory": memory}}
}

// asked is a claim on a machine, and its pod.
type asked struct {
	namespace, pod string
	allocators.Request
}

func machine(model string, n int, plan func(int) v1alpha1.Plan, claims ...asked) (*Machine, error) {
	m, err := NewMachine(model, n, plan)
	if err != nil {
		return nil, err
	}
	for i, a := range claims {
		name := a.pod + "-gpu"
		if a.pod == "" {
			name = fmt.Sprintf("scratch-%d", i)
		}
		if err := m.Claim(a.namespace, name, a.pod, a.Request); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// Idle returns a cluster of two pools without claims.
func Idle() (*Cluster, error) {
	c := New()
	big, err := machine("h100-80gb", 8, partitioned)
	if err != nil {
		return nil, err
	}
	small, err := machine("l40s", 4, sharedFrom(0))
	if err != nil {
		return nil, err
	}
	for i := range 2 {
		c.Add(big, fmt.Sprintf("train-%d", i), pool("training"))
		c.Add(small, fmt.Sprintf("infer-%d", i), pool("inference"))
	}
	c.policies()
	return c, nil
}

func (c *Cluster) policies() {
	c.Policies.Add(policy("training", 16, 2, metav1.Condition{Type: "Applied", Status: metav1.ConditionTrue, Reason: "Applied"}))
	c.Policies.Add(policy("inference", 8, 2, metav1.Condition{Type: "Applied", Status: metav1.ConditionTrue, Reason: "Applied"}))
}

func policy(name string, gpus, nodes int32, applied metav1.Condition) *v1alpha1.SharingPolicy {
	p := &v1alpha1.SharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}}
	p.Status.GPUs, p.Status.Nodes, p.Status.Conditions = gpus, nodes, []metav1.Condition{applied}
	return p
}

// Mixed is the same cluster in use: whole GPUs, partitions, shares and time slices, a
// blocked GPU, a MIG instance of somebody else's, a claim without a pod, and pods that wait.
func Mixed() (*Cluster, error) {
	c := New()
	whole := allocators.Request{Kind: "gpu"}
	for i, claims := range [][]asked{
		{
			{"research", "llama-70b-0", whole}, {"research", "llama-70b-1", whole}, {"research", "llama-70b-2", whole},
			{"vision", "detector-5d8f9c", mig("3g.40gb")}, {"vision", "tracker-77b4", mig("2g.20gb")}, {"", "", mig("1g.10gb")},
			{"lab", "notebook-ada", mig("1g.10gb")}, {"lab", "notebook-grace", mig("1g.20gb")}, {"vision", "segment-84ff7", mig("4g.40gb")},
		},
		{{"research", "eval-suite", whole}, {"lab", "notebook-alan", mig("3g.40gb")}, {"speech", "asr-6c9d7", mig("2g.20gb")}},
	} {
		for k := range claims {
			if claims[k].namespace == "" {
				claims[k].namespace = "lab"
			}
		}
		m, err := machine("h100-80gb", 8, partitioned, claims...)
		if err != nil {
			return nil, err
		}
		if i == 1 {
			m.Node.GPUs[6].Conditions = []gpu.Condition{{Type: gpu.ResetRequired, Message: "XID 95, uncontained ECC error: the driver asks for a reset of the GPU."}}
			m.Node.GPUs[7].MIG.Instances = []gpu.Instance{{UUID: "MIG-others", Profile: "2g.20gb", Placement: gpu.Placement{Start: 4, Size: 2}}}
		}
		c.Add(m, fmt.Sprintf("train-%d", i), pool("training"))
	}
	for i, claims := range [][]asked{
		{{"chat", "chat-7f6c9b-x2k", share("20Gi")}, {"chat", "chat-7f6c9b-p9q", share("12Gi")}, {"search", "embed-5b7", share("6Gi")}, {"search", "rerank-66d", share("24Gi")}, {"batch", "thumbs-1", allocators.Request{Kind: "timeslice"}}, {"batch", "thumbs-2", allocators.Request{Kind: "timeslice"}}},
		{{"chat", "chat-7f6c9b-zz1", share("30Gi")}},
	} {
		m, err := machine("l40s", 4, sharedFrom(0), claims...)
		if err != nil {
			return nil, err
		}
		c.Add(m, fmt.Sprintf("infer-%d", i), pool("inference"))
	}
	c.policies()
	c.Wait("research", "llama-405b-0", "gpus", "0/4 nodes are available: 4 cannot allocate all claims.", 14*time.Minute)
	c.Wait("vision", "pose-55c", "gpu", "0/4 nodes are available: 4 cannot allocate all claims.", 3*time.Minute)
	return c, nil
}

// Many is a cluster of 5,000 GPUs on 625 nodes, in four pools.
func Many() (*Cluster, error) {
	c := New()
	whole := allocators.Request{Kind: "gpu"}
	var fill []asked
	for i := range 8 {
		fill = append(fill, asked{"research", fmt.Sprintf("pretrain-%d", i), whole})
	}
	var cut []asked
	for i := range 7 {
		cut = append(cut, asked{"vision", fmt.Sprintf("infer-%d", i), mig([]string{"3g.40gb", "1g.10gb", "2g.20gb", "1g.20gb"}[i%4])})
	}
	cut = append(cut, asked{"vision", "big", whole}, asked{"vision", "bigger", whole}, asked{"lab", "notebook", mig("4g.40gb")})
	var shares []asked
	for i := range 6 {
		shares = append(shares, asked{"chat", fmt.Sprintf("chat-%d", i), share("14Gi")})
	}
	var machines []*Machine
	for _, x := range []struct {
		model  string
		plan   func(int) v1alpha1.Plan
		claims []asked
	}{
		{"h200", exclusive, fill}, {"h200", exclusive, fill[:5]}, {"h200", exclusive, nil}, {"h100-80gb", partitioned, cut}, {"h100-80gb", partitioned, cut[:4]},
		{"l40s", sharedFrom(0), shares}, {"l40s", sharedFrom(0), shares[:2]}, {"h100-80gb", partitioned, nil}, {"h200", exclusive, fill[:7]},
	} {
		m, err := machine(x.model, 8, x.plan, x.claims...)
		if err != nil {
			return nil, err
		}
		machines = append(machines, m)
	}
	machines[8].Node.GPUs[7].Conditions = []gpu.Condition{{Type: gpu.ResetRequired, Message: "XID 95, uncontained ECC error: the driver asks for a reset of the GPU."}}
	for i := range 625 {
		switch {
		case i < 300:
			c.Add(machines[[]int{0, 0, 0, 1, 0, 2, 0, 0, 1, 0}[(i*7+i/23)%10]], fmt.Sprintf("train-%03d", i), pool("training"))
		case i < 310:
			c.Add(machines[8], fmt.Sprintf("train-%03d", i), pool("training"))
		case i < 500:
			c.Add(machines[[]int{3, 4, 3, 7, 3}[(i*3+i/17)%5]], fmt.Sprintf("cut-%03d", i-310), pool("inference-mig"))
		case i < 600:
			c.Add(machines[[]int{5, 6, 5}[(i+i/7)%3]], fmt.Sprintf("share-%03d", i-500), pool("inference-shared"))
		default:
			c.Add(machines[[]int{4, 2, 7}[i%3]], fmt.Sprintf("dev-%03d", i-600), pool("development"))
		}
	}
	return c, nil
}
