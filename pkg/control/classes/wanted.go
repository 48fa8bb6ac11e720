package classes

import (
	"errors"
	"fmt"
	"os"

	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"
)

// Wanted describes the DeviceClasses of a release, as the chart writes them to a file.
type Wanted struct {
	// Owner is the name of a ClusterRole of the release. A class belongs to the
	// release if it has an ownerReference to this ClusterRole. The garbage collector
	// deletes the classes when it is deleted.
	Owner string `json:"owner"`
	// Labels that each class gets besides publish.ManagedByLabel.
	Labels map[string]string `json:"labels,omitempty"`
	// Classes are all that the cluster should have of this release; others that
	// belong to the release are deleted.
	Classes []Class `json:"classes"`
}

// Class is one DeviceClass. Its spec has the same form in all versions of the API.
type Class struct {
	Name string                      `json:"name"`
	Spec resourceapi.DeviceClassSpec `json:"spec"`
}

// Read reads a file of Wanted in YAML.
func Read(file string) (*Wanted, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read the DeviceClasses: %w", err)
	}
	w := &Wanted{}
	if err := yaml.UnmarshalStrict(data, w); err != nil {
		return nil, fmt.Errorf("read the DeviceClasses: %s: %w", file, err)
	}
	if err := w.validate(); err != nil {
		return nil, fmt.Errorf("read the DeviceClasses: %s: %w", file, err)
	}
	return w, nil
}

func (w *Wanted) validate() error {
	if w.Owner == "" {
		return errors.New("owner is missing: want the name of a ClusterRole")
	}
	seen := make(map[string]bool)
	for i, c := range w.Classes {
		switch {
		case c.Name == "":
			return fmt.Errorf("classes[%d] has no name", i)
		case seen[c.Name]:
			return fmt.Errorf("two classes have the name %s", c.Name)
		}
		seen[c.Name] = true
	}
	return nil
}
