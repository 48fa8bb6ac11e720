package v1alpha3

import "strings"

// direction has the names of the versions to translate from and to, and by kind the functions
// that translate the differing fields of an object in place.
type direction struct {
	from, to string
	kinds    map[string]func(object map[string]any)
}

//nolint:gochecknoglobals // constant
var (
	toAlpha = direction{beta, alpha, map[string]func(map[string]any){
		"ResourceSlice": func(slice map[string]any) { eachCapacity(slice, valueOf) },
		"ResourceClaim": dropDeviceStatus,
	}}
	toBeta = direction{alpha, beta, map[string]func(map[string]any){
		"ResourceSlice": func(slice map[string]any) { eachCapacity(slice, asValue) },
		"ResourceClaim": markAdminAccess,
	}}
)

// object translates an API object, a list of them, or an event of a watch.
func (d direction) object(o map[string]any) {
	if event, ok := o["object"].(map[string]any); ok {
		d.object(event)
		return
	}
	for _, key := range []string{"apiVersion", "groupVersion"} { // the second is discovery's
		if o[key] == d.from {
			o[key] = d.to
		}
	}
	kind, _ := o["kind"].(string)
	kind, isList := strings.CutSuffix(kind, "List")
	translate, ok := d.kinds[kind]
	switch {
	case !ok:
	case isList:
		each(o["items"], translate) // they don't say their kind
	default:
		translate(o)
	}
}

// eachCapacity replaces the capacities of a slice's devices.
func eachCapacity(slice map[string]any, replace func(any) any) {
	each(at(slice, "spec")["devices"], func(device map[string]any) {
		capacity := at(device, "basic", "capacity")
		for name, c := range capacity {
			capacity[name] = replace(c)
		}
	})
}

// valueOf returns the quantity of a v1beta1 capacity. A policy for requests is
// dropped: v1alpha3 has none.
func valueOf(capacity any) any {
	if c, ok := capacity.(map[string]any); ok {
		return c["value"]
	}
	return capacity
}

func asValue(quantity any) any { return map[string]any{"value": quantity} }

// dropDeviceStatus removes status.devices. Unlike other requests, a server-side apply
// is refused if it has a field that the version doesn't have.
func dropDeviceStatus(claim map[string]any) { delete(at(claim, "status"), "devices") }

// markAdminAccess marks the allocated devices of requests with admin access: in
// v1alpha3 only the request says so.
func markAdminAccess(claim map[string]any) {
	admin := map[any]bool{}
	each(at(claim, "spec", "devices")["requests"], func(request map[string]any) {
		admin[request["name"]] = request["adminAccess"] == true
	})
	each(at(claim, "status", "allocation", "devices")["results"], func(result map[string]any) {
		if admin[result["request"]] {
			result["adminAccess"] = true
		}
	})
}

// at returns the object under these keys; nil if there is none.
func at(o map[string]any, keys ...string) map[string]any {
	for _, key := range keys {
		o, _ = o[key].(map[string]any)
	}
	return o
}

func each(list any, do func(map[string]any)) {
	items, _ := list.([]any)
	for _, item := range items {
		if o, ok := item.(map[string]any); ok {
			do(o)
		}
	}
}
