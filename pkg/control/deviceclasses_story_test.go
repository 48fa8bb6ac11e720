//go:build integration

package control_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// classFile writes a file of DeviceClasses, one for each name, of a release whose
// ClusterRole is "owner".
func classFile(t *testing.T, names ...string) string {
	t.Helper()
	return classFileOf(t, "owner", names...)
}

// classFileOf writes a file of DeviceClasses, which belong to a ClusterRole that it
// creates.
func classFileOf(t *testing.T, owner string, names ...string) string {
	t.Helper()
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: owner}}
	if err := api.Create(t.Context(), role); err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = api.Delete(context.Background(), role) })
	text := "owner: " + owner + "\nclasses:\n"
	for _, name := range names {
		text += fmt.Sprintf("- name: %s\n  spec: {selectors: [{cel: {expression: 'true'}}], extendedResourceName: example.com/%s}\n", name, name)
	}
	file := filepath.Join(t.TempDir(), "device-classes.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// resourceVersionOfAPI is the version of resource.k8s.io that the server has.
func resourceVersionOfAPI() string {
	if v := os.Getenv("RESOURCE_API"); v != "" {
		return v
	}
	return "v1"
}

func deviceClass(name string) *unstructured.Unstructured {
	class := &unstructured.Unstructured{}
	class.SetGroupVersionKind(schema.GroupVersionKind{Group: resourceapi.GroupName, Version: resourceVersionOfAPI(), Kind: "DeviceClass"})
	class.SetName(name)
	return class
}

// getClass returns nil if there is no such class.
func getClass(t *testing.T, name string) *unstructured.Unstructured {
	t.Helper()
	class := deviceClass(name)
	if err := api.Get(t.Context(), client.ObjectKey{Name: name}, class); apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		t.Fatal(err)
	}
	return class
}

func resourceName(class *unstructured.Unstructured) string {
	if class == nil {
		return ""
	}
	name, _, _ := unstructured.NestedString(class.Object, "spec", "extendedResourceName")
	return name
}

// notOverwritten waits for an event NotOverwritten about the class that has the text.
func notOverwritten(t *testing.T, class, text string) {
	t.Helper()
	eventually(t, "an event NotOverwritten about "+class, func() bool {
		var events corev1.EventList
		if err := api.List(t.Context(), &events, client.InNamespace("default")); err != nil {
			t.Fatal(err)
		}
		for _, e := range events.Items {
			if e.InvolvedObject.Name == class && e.Reason == "NotOverwritten" && strings.Contains(e.Message, text) {
				return true
			}
		}
		return false
	})
}

func TestDeviceClassesAreKept(t *testing.T) {
	stop := startController(t, "--device-classes", classFile(t, "one", "two"))
	eventually(t, "both classes", func() bool { return getClass(t, "one") != nil && getClass(t, "two") != nil })
	one := getClass(t, "one")
	if owners := one.GetOwnerReferences(); len(owners) != 1 || owners[0].Kind != "ClusterRole" || owners[0].Name != "owner" || owners[0].UID == "" {
		t.Errorf("owners %v, want the ClusterRole", owners)
	}
	if err := unstructured.SetNestedField(one.Object, "example.com/another", "spec", "extendedResourceName"); err != nil {
		t.Fatal(err)
	}
	one.SetAnnotations(map[string]string{"mine": "stays"})
	if err := api.Update(t.Context(), one); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the edited class is put back", func() bool { return resourceName(getClass(t, "one")) == "example.com/one" })
	if getClass(t, "one").GetAnnotations()["mine"] != "stays" {
		t.Error("somebody's annotation is gone")
	}
	two := getClass(t, "two")
	if err := api.Delete(t.Context(), two); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the deleted class is put back", func() bool {
		now := getClass(t, "two")
		return now != nil && now.GetUID() != two.GetUID()
	})
	before := getClass(t, "two").GetResourceVersion() + getClass(t, "one").GetResourceVersion()
	stop()

	stop = startController(t, "--device-classes", classFile(t, "one", "two", "three"))
	eventually(t, "the third class", func() bool { return getClass(t, "three") != nil })
	if after := getClass(t, "two").GetResourceVersion() + getClass(t, "one").GetResourceVersion(); after != before {
		t.Error("a restart wrote classes that were as they should be")
	}
	stop()
	startController(t, "--device-classes", classFile(t))
	eventually(t, "classes that aren't wanted are deleted", func() bool {
		return getClass(t, "one") == nil && getClass(t, "two") == nil && getClass(t, "three") == nil
	})
}

// TestForeignDeviceClassStays checks that a class of another driver isn't touched,
// that an event says so, and that the controller's own follows when it is gone.
func TestForeignDeviceClassStays(t *testing.T) {
	theirs := deviceClass("theirs")
	theirs.SetAnnotations(map[string]string{"meta.helm.sh/release-name": "nvidia-dra-driver", "meta.helm.sh/release-namespace": "gpus"})
	theirs.Object["spec"] = map[string]any{"selectors": []any{map[string]any{"cel": map[string]any{"expression": "device.driver == 'theirs'"}}}}
	if err := api.Create(t.Context(), theirs); err != nil {
		t.Fatal(err)
	}
	stop := startController(t, "--device-classes", classFile(t, "theirs", "ours"))
	eventually(t, "our class", func() bool { return getClass(t, "ours") != nil })
	notOverwritten(t, "theirs", "Helm release nvidia-dra-driver in namespace gpus")
	if now := getClass(t, "theirs"); now.GetResourceVersion() != theirs.GetResourceVersion() {
		t.Errorf("their class was written: %v", now.Object)
	}
	if err := api.Delete(t.Context(), theirs); err != nil {
		t.Fatal(err)
	}
	eventually(t, "our class in place of theirs", func() bool { return resourceName(getClass(t, "theirs")) == "example.com/theirs" })
	stop()
	startController(t, "--device-classes", classFile(t))
	eventually(t, "our classes are deleted", func() bool { return getClass(t, "theirs") == nil && getClass(t, "ours") == nil })
}

// TestLabelMakesNoDeviceClassOurs checks that a class that has only Tessera's label, a
// copy for example, is neither changed nor deleted.
func TestLabelMakesNoDeviceClassOurs(t *testing.T) {
	copied := deviceClass("copied")
	copied.SetLabels(map[string]string{"app.kubernetes.io/managed-by": "tessera"})
	copied.Object["spec"] = map[string]any{"selectors": []any{map[string]any{"cel": map[string]any{"expression": "device.driver == 'mine'"}}}}
	if err := api.Create(t.Context(), copied); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = api.Delete(context.Background(), copied) })
	stop := startController(t, "--device-classes", classFile(t, "copied", "ours"))
	notOverwritten(t, "copied", "has no ownerReference to the ClusterRole owner")
	stop()

	startController(t, "--device-classes", classFile(t))
	// The class of the second round goes in a pass that began after the first one ended.
	eventually(t, "our class is deleted", func() bool { return getClass(t, "ours") == nil })
	again := deviceClass("again")
	again.SetOwnerReferences(ownedBy(t, "owner"))
	again.Object["spec"] = map[string]any{}
	if err := api.Create(t.Context(), again); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a class that only our owner marks is deleted", func() bool { return getClass(t, "again") == nil })
	if now := getClass(t, "copied"); now == nil || now.GetResourceVersion() != copied.GetResourceVersion() {
		t.Errorf("the copy was written or deleted: %v", now)
	}
}

// ownedBy returns a reference to a ClusterRole.
func ownedBy(t *testing.T, name string) []metav1.OwnerReference {
	t.Helper()
	role := &rbacv1.ClusterRole{}
	if err := api.Get(t.Context(), client.ObjectKey{Name: name}, role); err != nil {
		t.Fatal(err)
	}
	return []metav1.OwnerReference{{APIVersion: "rbac.authorization.k8s.io/v1", Kind: "ClusterRole", Name: name, UID: role.UID}}
}

// TestTwoReleases checks that a second release leaves the first one's classes alone,
// says whose they are, and creates its own when they are gone.
func TestTwoReleases(t *testing.T) {
	stop := startController(t, "--device-classes", classFileOf(t, "first", "shared", "old"))
	eventually(t, "the first release's classes", func() bool { return getClass(t, "shared") != nil && getClass(t, "old") != nil })
	stop()
	before := getClass(t, "shared").GetResourceVersion() + getClass(t, "old").GetResourceVersion()

	stop = startController(t, "--device-classes", classFileOf(t, "second", "shared", "own"))
	eventually(t, "the second release's class", func() bool { return getClass(t, "own") != nil })
	notOverwritten(t, "shared", "belongs to another release of Tessera, the one with the ClusterRole first")
	// A class that is put back shows that a whole pass has ended since the event.
	if err := api.Delete(t.Context(), getClass(t, "own")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the second release's class again", func() bool { return getClass(t, "own") != nil })
	if after := getClass(t, "shared").GetResourceVersion() + getClass(t, "old").GetResourceVersion(); after != before {
		t.Error("the second release wrote classes of the first one")
	}
	// In place of the garbage collector, which a lone API server doesn't have.
	if err := api.Delete(t.Context(), getClass(t, "shared")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the second release's class in place of the first's", func() bool {
		now := getClass(t, "shared")
		return now != nil && now.GetOwnerReferences()[0].Name == "second"
	})
	stop()
	stop = startController(t, "--device-classes", classFileOf(t, "second"))
	eventually(t, "the second release's classes are deleted", func() bool { return getClass(t, "shared") == nil && getClass(t, "own") == nil })
	stop()

	// The release is uninstalled and installed again, before the garbage collector has
	// deleted its classes.
	if err := api.Delete(t.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "first"}}); err != nil {
		t.Fatal(err)
	}
	stop = startController(t, "--device-classes", classFileOf(t, "first", "old"))
	want := ownedBy(t, "first")
	eventually(t, "the class belongs to the new ClusterRole", func() bool {
		now := getClass(t, "old")
		return now != nil && now.GetOwnerReferences()[0].UID == want[0].UID
	})
	stop()
	startController(t, "--device-classes", classFileOf(t, "first"))
	eventually(t, "the first release's class is deleted", func() bool { return getClass(t, "old") == nil })
}

// TestDeviceClassesOfAReleaseThatIsGone checks that no class is written without the
// owner that has it deleted.
func TestDeviceClassesOfAReleaseThatIsGone(t *testing.T) {
	file := classFile(t, "orphan")
	if err := api.Delete(t.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "owner"}}); err != nil {
		t.Fatal(err)
	}
	startController(t, "--device-classes", file)
	eventually(t, "the log says so", func() bool { return strings.Contains(controllerLog(), "their owner is gone") })
	if getClass(t, "orphan") != nil {
		t.Error("a class without an owner was created")
	}
}
