//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/rogpeppe/go-internal/testscript"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"

	"github.com/tessera-dra/tessera/test/stack"
)

// metadata prints what the container main of a pod can read about its devices, an
// attribute a line as NAME=VALUE, sorted. It fails if an attribute differs from that
// of the same name in the device's ResourceSlice, and if nvidia-smi in the container
// doesn't know the device by its uuid.
//
//	metadata [NAMESPACE/]POD
func metadata(ts *testscript.TestScript, s *stack.Stack, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: metadata [NAMESPACE/]POD")
	}
	namespace, pod := address(ts, args[0])
	devices, err := readMetadata(s, namespace, pod)
	ts.Check(err)
	listed, err := s.Kubectl(context.Background(), "-n", namespace, "exec", pod, "--", "nvidia-smi", "-L")
	ts.Check(err)
	var lines []string
	for _, d := range devices {
		published, err := publishedAttributes(s, d.Pool, d.Name)
		ts.Check(err)
		for name, a := range d.Attributes {
			lines = append(lines, string(name)+"="+valueOf(a))
			if p, ok := published[name]; ok && name != "uuid" && valueOf(p) != valueOf(a) {
				ts.Fatalf("%s of %s is %q in the container, and %q in its ResourceSlice", name, d.Name, valueOf(a), valueOf(p))
			}
		}
		if uuid := valueOf(d.Attributes["uuid"]); uuid == "" || !strings.Contains(listed, uuid) {
			ts.Fatalf("nvidia-smi -L has no %q:\n%s", uuid, listed)
		}
	}
	slices.Sort(lines)
	_, err = fmt.Fprintln(ts.Stdout(), strings.Join(lines, "\n"))
	ts.Check(err)
}

// readMetadata reads the files in the container.
func readMetadata(s *stack.Stack, namespace, pod string) ([]v1beta1.Device, error) {
	out, err := s.Kubectl(context.Background(), "-n", namespace, "exec", pod, "--",
		"sh", "-c", "cat /var/run/kubernetes.io/dra-device-attributes/*/*/*/*")
	if err != nil {
		return nil, err
	}
	var devices []v1beta1.Device
	for decoder := json.NewDecoder(strings.NewReader(out)); ; {
		var m v1beta1.DeviceMetadata
		if err := decoder.Decode(&m); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("read the metadata of pod %s: %w\n%s", pod, err, out)
		}
		if m.APIVersion != v1beta1.SchemeGroupVersion.String() || m.Kind != "DeviceMetadata" {
			return nil, fmt.Errorf("the metadata of pod %s is a %s of %s", pod, m.Kind, m.APIVersion)
		}
		for _, r := range m.Requests {
			devices = append(devices, r.Devices...)
		}
	}
	if len(devices) == 0 {
		return nil, fmt.Errorf("pod %s has no metadata", pod)
	}
	return devices, nil
}

func publishedAttributes(s *stack.Stack, pool, name string) (map[resourcev1.QualifiedName]resourcev1.DeviceAttribute, error) {
	all, err := s.Slices(context.Background())
	if err != nil {
		return nil, err
	}
	for _, slice := range all {
		for _, d := range slice.Spec.Devices {
			if slice.Spec.Pool.Name == pool && d.Name == name {
				return d.Attributes, nil
			}
		}
	}
	return nil, fmt.Errorf("no ResourceSlice of pool %s has device %s", pool, name)
}

// valueOf returns an attribute's value; empty without one.
func valueOf(a resourcev1.DeviceAttribute) string {
	switch {
	case a.StringValue != nil:
		return *a.StringValue
	case a.VersionValue != nil:
		return *a.VersionValue
	case a.IntValue != nil:
		return fmt.Sprint(*a.IntValue)
	case a.BoolValue != nil:
		return fmt.Sprint(*a.BoolValue)
	}
	return ""
}
