package rule

import (
	"context"

	"github.com/tessera-dra/tessera/pkg/gpu"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/dynamic-resource-allocation/cel"
)

// Selector is a compiled gpuSelector.
type Selector struct{ compiled cel.CompilationResult }

// compile compiles a gpuSelector in the language of DeviceClass selectors.
func compile(expression string) (*Selector, error) {
	result := cel.GetCompiler(cel.Features{}).CompileCELExpression(expression, cel.Options{})
	if result.Error != nil {
		return nil, field.Invalid(field.NewPath("spec", "gpuSelector"), expression, result.Error.Error())
	}
	return &Selector{compiled: result}, nil
}

func (s *Selector) matches(ctx context.Context, d resourceapi.Device) (bool, error) {
	ok, _, err := s.compiled.DeviceMatches(ctx, cel.Device{Driver: gpu.DriverName, Attributes: d.Attributes, Capacity: d.Capacity})
	return ok, cel.EnhanceRuntimeError(err)
}
