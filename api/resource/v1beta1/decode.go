package v1beta1

import (
	stdjson "encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/json"
)

// Decode reads the parameters of an opaque device configuration (JSON),
// strictly: an unknown or repeated field, a wrong type, and another kind or
// version is an error that names the field. Values are for the configuration's
// Validate to check, because one that doesn't apply to a device needs none that
// are valid.
func Decode(raw []byte) (Config, error) {
	var meta metav1.TypeMeta
	if err := json.UnmarshalCaseSensitivePreserveInts(raw, &meta); err != nil {
		return nil, fmt.Errorf("claim configuration: %w", explain(err, raw))
	}
	config, err := empty(meta)
	if err != nil {
		return nil, err
	}
	strict, err := json.UnmarshalStrict(raw, config)
	switch {
	case err != nil:
		return nil, fmt.Errorf("%s: %w", meta.Kind, explain(err, raw))
	case len(strict) > 0:
		return nil, fmt.Errorf("%s: %w", meta.Kind, errors.Join(strict...))
	}
	return config, nil
}

func empty(meta metav1.TypeMeta) (Config, error) {
	if meta.APIVersion != APIVersion {
		return nil, fmt.Errorf("claim configuration: apiVersion is %q, this driver knows %s", meta.APIVersion, APIVersion)
	}
	switch meta.Kind {
	case GpuConfigKind:
		return &GpuConfig{}, nil
	case MigDeviceConfigKind:
		return &MigDeviceConfig{}, nil
	case VfioDeviceConfigKind:
		return &VfioDeviceConfig{}, nil
	default:
		return nil, fmt.Errorf("claim configuration: kind is %q, this driver knows %s and %s", meta.Kind, GpuConfigKind, MigDeviceConfigKind)
	}
}

// explain names the field where the decoder's error doesn't, or not in words
// that a user of the API knows.
func explain(err error, raw []byte) error {
	if wrong := (*stdjson.UnmarshalTypeError)(nil); errors.As(err, &wrong) {
		if wrong.Field == "" {
			return fmt.Errorf("is a JSON %s, want an object", wrong.Value)
		}
		return fmt.Errorf("%s: a JSON %s doesn't fit here", wrong.Field, wrong.Value)
	}
	if errs := badQuantities(raw); len(errs) > 0 {
		return errs.ToAggregate()
	}
	return err
}

// badQuantities finds the memory limits that are none: the decoder of
// quantities doesn't know which field it reads.
func badQuantities(raw []byte) field.ErrorList {
	var c struct {
		Sharing struct {
			MpsConfig map[string]any `json:"mpsConfig"`
		} `json:"sharing"`
	}
	if json.UnmarshalCaseSensitivePreserveInts(raw, &c) != nil {
		return nil
	}
	path := field.NewPath("sharing", "mpsConfig")
	errs := badQuantity(c.Sharing.MpsConfig["defaultPinnedDeviceMemoryLimit"], path.Child("defaultPinnedDeviceMemoryLimit"))
	limits, _ := c.Sharing.MpsConfig["defaultPerDevicePinnedMemoryLimit"].(map[string]any)
	for _, key := range slices.Sorted(maps.Keys(limits)) {
		errs = append(errs, badQuantity(limits[key], path.Child("defaultPerDevicePinnedMemoryLimit").Key(key))...)
	}
	return errs
}

func badQuantity(v any, path *field.Path) field.ErrorList {
	if v == nil {
		return nil
	}
	if _, err := resource.ParseQuantity(strings.TrimSpace(fmt.Sprint(v))); err != nil {
		return field.ErrorList{field.Invalid(path, v, "must be a quantity such as 10Gi")}
	}
	return nil
}
