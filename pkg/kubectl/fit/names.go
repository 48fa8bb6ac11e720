package fit

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/sets"
)

// noSuchKey begins the CEL error of a selector that reads a name that a device hasn't.
const noSuchKey = "no such key: "

// term finds the attributes and capacities that a CEL expression reads:
// device.attributes["gpu.nvidia.com"].?profile, device.capacity['gpu.nvidia.com'].memory.
var term = regexp.MustCompile(`device\.(attributes|capacity)\[\??\s*['"]([^'"]+)['"]\s*\]\s*\.\s*(?:\?|orValue\(\{\}\)\.\??)?([A-Za-z_][A-Za-z0-9_]*)`)

// reading is an attribute or a capacity that a selector reads.
type reading struct{ kind, domain, name string }

// readingsOf lists what a selector reads, each once.
func readingsOf(s resourceapi.DeviceSelector) []reading {
	var out []reading
	if s.CEL == nil {
		return nil
	}
	for _, m := range term.FindAllStringSubmatch(s.CEL.Expression, -1) {
		if r := (reading{m[1], m[2], m[3]}); !slices.Contains(out, r) {
			out = append(out, r)
		}
	}
	return out
}

// of returns the value that a device has; "" if it has none.
func (r reading) of(d offered) string {
	if r.kind == "capacity" {
		if c, ok := in(d.Capacity, d, r.domain, r.name); ok {
			return c.Value.String()
		}
		return ""
	}
	a, ok := in(d.Attributes, d, r.domain, r.name)
	switch {
	case !ok:
		return ""
	case a.StringValue != nil:
		return cmp.Or(*a.StringValue, `""`)
	case a.IntValue != nil:
		return fmt.Sprint(*a.IntValue)
	case a.BoolValue != nil:
		return fmt.Sprint(*a.BoolValue)
	case a.VersionValue != nil:
		return *a.VersionValue
	default:
		return "of a type of its own"
	}
}

// in looks up a name of a domain. Names without a domain are of the driver's.
func in[T any](all map[resourceapi.QualifiedName]T, d offered, domain, name string) (T, bool) {
	v, ok := all[resourceapi.QualifiedName(domain+"/"+name)]
	if !ok && domain == d.driver {
		v, ok = all[resourceapi.QualifiedName(name)]
	}
	return v, ok
}

// unknown returns a sentence that no device has the name, with the names that they have; ""
// if one has it.
func (r reading) unknown(devices []offered) string {
	names, domains := sets.New[string](), sets.New[string]()
	for _, d := range devices {
		if r.of(d) != "" {
			return ""
		}
		all := slices.Collect(maps.Keys(d.Attributes))
		if r.kind == "capacity" {
			all = slices.Collect(maps.Keys(d.Capacity))
		}
		for _, name := range all {
			domain, of, found := strings.Cut(string(name), "/")
			if !found {
				domain, of = d.driver, domain
			}
			if domains.Insert(domain); domain == r.domain {
				names.Insert(of)
			}
		}
	}
	what, are := "attribute", "attributes"
	if r.kind == "capacity" {
		what, are = r.kind, "capacities"
	}
	if len(names) == 0 {
		return fmt.Sprintf("none of them has %s of the domain %s, only of %s", are, r.domain, list(sets.List(domains)))
	}
	return fmt.Sprintf("none of them has the %s %s; the %s of %s are %s", what, r.name, are, r.domain, list(sets.List(names)))
}

// values lists the values of the attributes and capacities that the selector reads.
func values(s resourceapi.DeviceSelector, devices []offered) string {
	var out []string
	for _, r := range readingsOf(s) {
		line := r.unknown(devices)
		if line == "" || len(devices) == 0 {
			line = tally(r.name, devices, func(d offered) string { return cmp.Or(r.of(d), "absent") })
		}
		if !slices.Contains(out, line) {
			out = append(out, line)
		}
	}
	if len(out) == 0 {
		return "it reads no attribute of the driver"
	}
	return strings.Join(out, "; ")
}

// unknownKey advises on a name that a selector of the claims reads and that a device
// hasn't; "" if others of the DeviceClass have it.
func (j *Judge) unknownKey(ctx context.Context, nodes []*corev1.Node, claims []*resourceapi.ResourceClaim, key string) string {
	devices := j.offers(nodes)
	for _, c := range claims {
		for i := range c.Spec.Devices.Requests {
			for _, w := range wishesOf(&c.Spec.Devices.Requests[i]) {
				ofClass := j.granted(ctx, devices, wish{class: w.class})
				if why := w.unknownKey(ofClass, key); why != "" {
					return fmt.Sprintf("Correct the name: of the %s of DeviceClass %s, %s.", count(len(ofClass), "device"), w.class, why)
				}
			}
		}
	}
	return ""
}

// unknownKey returns a sentence that none of the devices has a name that a selector reads; ""
// if one has it, or no selector reads it.
func (w wish) unknownKey(devices []offered, key string) string {
	if len(devices) == 0 {
		return ""
	}
	for _, s := range w.selectors {
		for _, r := range readingsOf(s) {
			if r.name != key {
				continue
			}
			if why := r.unknown(devices); why != "" {
				return why
			}
		}
	}
	return ""
}

// noCapacity explains which of the capacities that a request asks for none of the devices
// has.
func noCapacity(w wish, devices []offered) *Reason {
	var absent, short []string
	for _, name := range slices.Sorted(maps.Keys(w.capacity.Requests)) {
		want := w.capacity.Requests[name]
		has := func(d offered) bool { _, ok := d.Capacity[name]; return ok }
		enough := func(d offered) bool { return has(d) && want.Cmp(mostOf(d.Capacity[name])) <= 0 }
		switch {
		case !slices.ContainsFunc(devices, has):
			absent = append(absent, string(name))
		case !slices.ContainsFunc(devices, enough):
			short = append(short, string(name))
		}
	}
	if len(absent) > 0 {
		return &Reason{
			Cause: NoMatch,
			Text: fmt.Sprintf("Request %s asks for the capacity %s, which none of the %s that match has; %s.",
				w.name, list(absent), count(len(devices), "device"), capacityNames(devices)),
			Change: "Correct the names in the request's capacity, or leave them out.",
		}
	}
	if len(short) == 0 { // each device lacks another one
		for name := range w.capacity.Requests {
			short = append(short, string(name))
		}
		slices.Sort(short)
	}
	var wanted, has []string
	for _, name := range short {
		q := w.capacity.Requests[resourceapi.QualifiedName(name)]
		wanted = append(wanted, fmt.Sprintf("%s of capacity %s", q.String(), name))
		has = append(has, tally(name, devices, func(d offered) string { return mostText(d, name) }))
	}
	return &Reason{
		Cause: NoMatch,
		Text: fmt.Sprintf("Request %s asks for %s, which none of the %s that match has: %s.",
			w.name, list(wanted), count(len(devices), "device"), strings.Join(has, "; ")),
		Change: "Ask for less.",
	}
}

func capacityNames(devices []offered) string {
	names := sets.New[string]()
	for _, d := range devices {
		for name := range d.Capacity {
			names.Insert(string(name))
		}
	}
	if len(names) == 0 {
		return "they have no capacities"
	}
	return "their capacities are " + list(sets.List(names))
}

// mostOf returns the most that one request can have of a capacity.
func mostOf(c resourceapi.DeviceCapacity) resource.Quantity {
	most := c.Value
	p := c.RequestPolicy
	switch {
	case p == nil:
	case p.ValidRange != nil && p.ValidRange.Max != nil && p.ValidRange.Max.Cmp(most) < 0:
		most = *p.ValidRange.Max
	case len(p.ValidValues) > 0 && p.ValidValues[len(p.ValidValues)-1].Cmp(most) < 0: // they ascend
		most = p.ValidValues[len(p.ValidValues)-1]
	}
	return most
}

// mostText writes how much of a capacity one request can have of a device.
func mostText(d offered, name string) string {
	c, ok := d.Capacity[resourceapi.QualifiedName(name)]
	if !ok {
		return "absent"
	}
	most := mostOf(c)
	if most.Cmp(c.Value) < 0 {
		return "at most " + most.String() + " for one request"
	}
	return most.String()
}
