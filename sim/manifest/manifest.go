// Package manifest rewrites manifests of resource.k8s.io/v1, in which the tests
// and the demo are written, for older Kubernetes versions, and reads objects of
// those versions as v1. It knows only the differences that occur in the tests.
package manifest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"
)

// Version returns the newest version of resource.k8s.io that a Kubernetes version
// ("1.33") can serve.
func Version(kubernetes string) string {
	_, text, _ := strings.Cut(kubernetes, ".")
	switch minor, _ := strconv.Atoi(text); { // of a version that a cluster was made of
	case minor >= 34:
		return resourceapi.SchemeGroupVersion.Version
	case minor == 33:
		return "v1beta2"
	case minor == 32:
		return "v1beta1"
	default:
		return "v1alpha3"
	}
}

var (
	separator = regexp.MustCompile(`(?m)^---[ \t]*$`)
	isNewest  = regexp.MustCompile(`(?m)^apiVersion: resource\.k8s\.io/v1[ \t]*$`)
)

// Convert rewrites the YAML documents of resource.k8s.io/v1 for an older version
// of that API. All others stay as they are, byte for byte.
func Convert(manifests []byte, version string) ([]byte, error) {
	if version == resourceapi.SchemeGroupVersion.Version {
		return manifests, nil
	}
	documents := separator.Split(string(manifests), -1)
	for i, document := range documents {
		if !isNewest.MatchString(document) {
			continue
		}
		converted, err := convertDocument(document, version)
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", i+1, err)
		}
		documents[i] = "\n" + converted
	}
	return []byte(strings.Join(documents, "---")), nil
}

func convertDocument(document, version string) (string, error) {
	var object map[string]any
	if err := yaml.Unmarshal([]byte(document), &object); err != nil {
		return "", fmt.Errorf("read YAML: %w", err)
	}
	object["apiVersion"] = "resource.k8s.io/" + version
	if version != "v1beta2" { // which differs from v1 in nothing that is written here
		flatten(object)
		wrap(object, version)
	}
	data, err := yaml.Marshal(object)
	return string(data), err
}

// flatten moves the fields of each request's "exactly" into the request, as
// v1beta1 and v1alpha3 have them.
func flatten(value any) {
	switch value := value.(type) {
	case []any:
		for _, element := range value {
			flatten(element)
		}
	case map[string]any:
		if exactly, found := value["exactly"].(map[string]any); found {
			delete(value, "exactly")
			maps.Copy(value, exactly)
		}
		for _, field := range value {
			flatten(field)
		}
	}
}

// wrap moves the fields of a ResourceSlice's devices into "basic", as v1beta1 and
// v1alpha3 have them, and makes v1alpha3's quantities of capacities.
func wrap(object map[string]any, version string) {
	spec, _ := object["spec"].(map[string]any)
	devices, _ := spec["devices"].([]any) // of a claim it is an object
	for i, device := range devices {
		basic, _ := device.(map[string]any)
		name := basic["name"]
		delete(basic, "name")
		capacities, _ := basic["capacity"].(map[string]any)
		for key, capacity := range capacities {
			if of, is := capacity.(map[string]any); is && version == "v1alpha3" {
				capacities[key] = of["value"]
			}
		}
		devices[i] = map[string]any{"name": name, "basic": basic}
	}
}

// Read reads the JSON of a ResourceSlice, a ResourceClaim or a list of them, of
// any version, into the type of v1. The requests of claims older than v1beta2
// are left out.
func Read(data []byte, into any) error {
	var object any
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.UseNumber()
	if err := decoder.Decode(&object); err != nil {
		return fmt.Errorf("read JSON: %w", err)
	}
	unwrap(object)
	data, err := json.Marshal(object)
	if err != nil {
		return err
	}
	return json.Unmarshal(data, into)
}

// unwrap moves the fields of each device's "basic" into the device, as v1 has
// them, and makes objects of the quantities that are v1alpha3's capacities.
func unwrap(value any) {
	switch value := value.(type) {
	case []any:
		for _, element := range value {
			unwrap(element)
		}
	case map[string]any:
		if basic, found := value["basic"].(map[string]any); found {
			delete(value, "basic")
			maps.Copy(value, basic)
			capacities, _ := basic["capacity"].(map[string]any)
			for name, quantity := range capacities {
				if text, old := quantity.(string); old {
					capacities[name] = map[string]any{"value": text}
				}
			}
		}
		for _, field := range value {
			unwrap(field)
		}
	}
}
