package fit

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
)

// offered is a device of a node.
type offered struct {
	node   string
	driver string
	*resourceapi.Device
}

// offers lists the devices of the nodes, each once.
func (j *Judge) offers(nodes []*corev1.Node) []offered {
	var out []offered
	for i, n := range nodes {
		all := j.slicesFor(n)
		if i > 0 {
			all = j.byNode[n.Name]
		}
		for _, s := range all {
			for k := range s.Spec.Devices {
				out = append(out, offered{n.Name, s.Spec.Driver, &s.Spec.Devices[k]})
			}
		}
	}
	return out
}

// matching are those of the devices for which a selector is true. A selector that fails
// is true for none.
func (j *Judge) matching(ctx context.Context, s resourceapi.DeviceSelector, devices []offered) []offered {
	if s.CEL == nil {
		return nil
	}
	compiled := j.cache.GetOrCompile(s.CEL.Expression)
	if compiled.Error != nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(devices), func(d offered) bool {
		ok, _, err := compiled.DeviceMatches(ctx, cel.Device{
			Driver: d.driver, AllowMultipleAllocations: d.AllowMultipleAllocations, Attributes: d.Attributes, Capacity: d.Capacity,
		})
		return !ok || err != nil
	})
}

// wish is a request, or one of its alternatives.
type wish struct {
	name, class string
	selectors   []resourceapi.DeviceSelector
	tolerations []resourceapi.DeviceToleration
	capacity    *resourceapi.CapacityRequirements
}

// wishesOf lists the request, or all of its alternatives.
func wishesOf(r *resourceapi.DeviceRequest) []wish {
	if e := r.Exactly; e != nil {
		return []wish{{r.Name, e.DeviceClassName, e.Selectors, e.Tolerations, e.Capacity}}
	}
	var out []wish
	for _, s := range r.FirstAvailable {
		out = append(out, wish{r.Name + "/" + s.Name, s.DeviceClassName, s.Selectors, s.Tolerations, s.Capacity})
	}
	return out
}

// noMatch explains why none of the devices matches.
func (j *Judge) noMatch(ctx context.Context, devices []offered, w wish) *Reason {
	ofClass := devices
	if class := j.classes[w.class]; class != nil {
		for _, s := range class.Spec.Selectors {
			before := ofClass
			if ofClass = j.matching(ctx, s, ofClass); len(ofClass) == 0 {
				return &Reason{
					Cause: NoMatch,
					Text: fmt.Sprintf("DeviceClass %s of request %s selects none of the nodes' %s: its selector %s is never true; %s.",
						w.class, w.name, count(len(devices), "device"), oneLine(s), values(s, before)),
					Change: "Choose another DeviceClass, or a SharingPolicy that offers such devices.",
				}
			}
		}
	}
	left := ofClass
	for _, s := range w.selectors {
		alone := j.matching(ctx, s, ofClass)
		left = j.matching(ctx, s, left)
		if len(alone) == 0 {
			return &Reason{
				Cause: NoMatch,
				Text: fmt.Sprintf("The selector %s of request %s is true for none of the %s of DeviceClass %s: %s.",
					oneLine(s), w.name, count(len(ofClass), "device"), w.class, values(s, ofClass)),
				Change: "Correct the selector, or add nodes or a SharingPolicy with such devices.",
			}
		}
	}
	switch {
	case len(left) == 0:
		return &Reason{
			Cause: NoMatch, Text: fmt.Sprintf("Each selector of request %s is true for some devices of DeviceClass %s, and no device meets all of them.", w.name, w.class),
			Change: "Leave out one of the selectors, or add nodes or a SharingPolicy with such devices.",
		}
	case w.capacity != nil:
		return noCapacity(w, left)
	}
	return &Reason{
		Cause: NoMatch, Text: fmt.Sprintf("None of the %s that match request %s can be allocated on a node that it can run on.", count(len(left), "device"), w.name),
		Change: "Look at the ResourceSlices: kubectl get resourceslices -o yaml.",
	}
}

func oneLine(s resourceapi.DeviceSelector) string {
	return strings.Join(strings.Fields(s.CEL.Expression), " ")
}

// maxValues is how many different values of an attribute a sentence lists.
const maxValues = 8

// tally lists the values of something: "profile is 1g.10gb (7 devices), 2g.20gb (3)".
func tally(name string, devices []offered, of func(offered) string) string {
	times := make(map[string]int)
	for _, d := range devices {
		times[of(d)]++
	}
	var all []string
	for v := range times {
		all = append(all, v)
	}
	slices.SortFunc(all, func(a, b string) int { return cmp.Or(cmp.Compare(times[b], times[a]), cmp.Compare(a, b)) })
	var out []string
	for i, v := range all[:min(len(all), maxValues)] {
		if i == 0 {
			out = append(out, fmt.Sprintf("%s (%s)", v, count(times[v], "device")))
		} else {
			out = append(out, fmt.Sprintf("%s (%d)", v, times[v]))
		}
	}
	if more := len(all) - maxValues; more > 0 {
		out = append(out, fmt.Sprintf("and %s more", count(more, "value")))
	}
	return name + " is " + strings.Join(out, ", ")
}

// whyTainted explains which taints keep the claims off.
func (j *Judge) whyTainted(ctx context.Context, nodes []*corev1.Node, claims []*resourceapi.ResourceClaim) *Reason {
	on := make(map[string]map[string]bool)
	matched, tainted := sets.New[*resourceapi.Device](), sets.New[*resourceapi.Device]()
	devices := j.offers(nodes)
	for _, c := range claims {
		for i := range c.Spec.Devices.Requests {
			for _, w := range wishesOf(&c.Spec.Devices.Requests[i]) {
				for _, d := range j.granted(ctx, devices, w) {
					matched.Insert(d.Device)
					if t := untolerated(d, w.tolerations); t != "" {
						if tainted.Insert(d.Device); on[t] == nil {
							on[t] = make(map[string]bool)
						}
						on[t][d.node] = true
					}
				}
			}
		}
	}
	var taints []string
	for t, where := range on {
		var names []string
		for n := range where {
			names = append(names, n)
		}
		slices.Sort(names)
		if len(names) > maxValues {
			names = append(names[:maxValues], count(len(names)-maxValues, "more node"))
		}
		taints = append(taints, fmt.Sprintf("%s on %s", t, list(names)))
	}
	slices.Sort(taints)
	return &Reason{
		Cause:  Tainted,
		Text:   fmt.Sprintf("Of %s that match, %d have taints that the claim doesn't tolerate: %s.", count(len(matched), "device"), len(tainted), strings.Join(taints, "; ")),
		Change: "Repair the devices, or tolerate the taints in the claim's request.",
	}
}

// granted are the devices that the selectors of the wish and of its class are true for.
func (j *Judge) granted(ctx context.Context, devices []offered, w wish) []offered {
	all := w.selectors
	if class := j.classes[w.class]; class != nil {
		all = slices.Concat(class.Spec.Selectors, all)
	}
	for _, s := range all {
		devices = j.matching(ctx, s, devices)
	}
	return devices
}

// untolerated returns the first taint that keeps a claim off the device; "" if none
// does.
func untolerated(d offered, tolerations []resourceapi.DeviceToleration) string {
	for _, t := range d.Taints {
		if t.Effect == resourceapi.DeviceTaintEffectNone {
			continue
		}
		if !slices.ContainsFunc(tolerations, func(x resourceapi.DeviceToleration) bool { return resourceclaim.ToleratesTaint(x, t) }) {
			return fmt.Sprintf("%s=%s:%s", t.Key, t.Value, t.Effect)
		}
	}
	return ""
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
