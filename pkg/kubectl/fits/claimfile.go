package fits

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"

	resourceapi "k8s.io/api/resource/v1"
	resourcev1beta1 "k8s.io/api/resource/v1beta1"
	resourcev1beta2 "k8s.io/api/resource/v1beta2"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
	apiv1beta1 "k8s.io/dynamic-resource-allocation/api/v1beta1"
	apiv1beta2 "k8s.io/dynamic-resource-allocation/api/v1beta2"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/kubectl/fit"
)

// readClaims reads the claims, and those that templates make, of a file. It refuses
// unknown fields.
func readClaims(file string, in io.Reader) ([]*resourceapi.ResourceClaim, error) {
	content, err := cluster.ReadFile(file, in)
	if err != nil {
		return nil, err
	}
	documents := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(content)))
	var out []*resourceapi.ResourceClaim
	for {
		raw, err := documents.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		var c *resourceapi.ResourceClaim
		if err == nil {
			c, err = readClaim(raw)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if c != nil {
			out = append(out, c)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%s has no ResourceClaim and no ResourceClaimTemplate", file)
	}
	return out, nil
}

// readClaim reads one document; nil if it is something else.
func readClaim(raw []byte) (*resourceapi.ResourceClaim, error) {
	if len(bytes.TrimSpace(raw)) == 0 {
		return nil, nil //nolint:nilnil // nothing between two separators
	}
	plain, err := sigsyaml.YAMLToJSONStrict(raw)
	if err != nil {
		return nil, err
	}
	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	obj, kind, err := decoder.Decode(plain, nil, nil)
	if runtime.IsNotRegisteredError(err) && kind != nil && !scheme.Scheme.IsGroupRegistered(kind.Group) {
		return nil, nil //nolint:nilnil // of a CustomResourceDefinition, such as a SharingPolicy
	}
	if err != nil {
		return nil, err
	}
	c, err := claimOf(obj)
	if c != nil {
		fit.Default(c)
	}
	return c, err
}

// claimOf returns the claim that the object is, or makes; nil if it is something else.
func claimOf(obj runtime.Object) (*resourceapi.ResourceClaim, error) {
	claim, template := &resourceapi.ResourceClaim{}, &resourceapi.ResourceClaimTemplate{}
	var err error
	switch o := obj.(type) {
	case *resourceapi.ResourceClaim:
		claim = o
	case *resourcev1beta2.ResourceClaim:
		err = apiv1beta2.Convert_v1beta2_ResourceClaim_To_v1_ResourceClaim(o, claim, nil)
	case *resourcev1beta1.ResourceClaim:
		err = apiv1beta1.Convert_v1beta1_ResourceClaim_To_v1_ResourceClaim(o, claim, nil)
	case *resourceapi.ResourceClaimTemplate:
		template = o
	case *resourcev1beta2.ResourceClaimTemplate:
		err = apiv1beta2.Convert_v1beta2_ResourceClaimTemplate_To_v1_ResourceClaimTemplate(o, template, nil)
	case *resourcev1beta1.ResourceClaimTemplate:
		err = apiv1beta1.Convert_v1beta1_ResourceClaimTemplate_To_v1_ResourceClaimTemplate(o, template, nil)
	default:
		return nil, nil //nolint:nilnil // a Pod beside its claims, say
	}
	if template.Name != "" || template.GenerateName != "" {
		claim.Name, claim.Spec = template.Name, template.Spec.Spec
	}
	if err == nil && len(claim.Spec.Devices.Requests) == 0 {
		err = errors.New("the claim requests no devices (spec.devices.requests)")
	}
	return claim, err
}
