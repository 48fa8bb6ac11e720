//go:build integration

package test

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// tenant has the rights of Kubernetes' role edit in one namespace.
func tenant(t *testing.T, s *server) {
	ctx := t.Context()
	for _, o := range []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "team"}},
		&rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "edit"},
			// The role edit is put together from this one by a controller, which isn't here.
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "system:aggregate-to-edit"},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "tenant"}},
		},
	} {
		if err := s.admin.Create(ctx, o); err != nil {
			t.Fatal(err)
		}
	}
	config := rest.CopyConfig(s.config)
	config.Impersonate = rest.ImpersonationConfig{UserName: "tenant", Groups: []string{"system:authenticated"}}
	tenant, err := client.New(config, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	request := resourceapi.DeviceRequest{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: driver, AdminAccess: new(true)}}
	const label = "admin access to devices requires the `resource.kubernetes.io/admin-access: true` label"
	mine := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "mine"}}
	mine.Spec.Devices.Requests = []resourceapi.DeviceRequest{request}
	template := &resourceapi.ResourceClaimTemplate{ObjectMeta: mine.ObjectMeta}
	template.Spec.Spec = mine.Spec
	for _, admin := range []client.Object{mine.DeepCopy(), template} {
		denied(t, label, func(ctx context.Context) error { return tenant.Create(ctx, admin) })
	}
	mine.Spec.Devices.Requests[0].Exactly.AdminAccess = nil
	if err := tenant.Create(ctx, mine.DeepCopy()); err != nil {
		t.Fatalf("a claim of its own: %v", err)
	}
	forbidden := func(what string, err error) {
		t.Helper()
		if !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v, want it forbidden", what, err)
		}
	}
	status := client.RawPatch(types.MergePatchType, []byte(`{"status": {"devices": []}}`))
	theirs := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim-a"}}
	forbidden("allocate its own claim", tenant.Status().Patch(ctx, mine.DeepCopy(), status))
	forbidden("read another namespace's claim", tenant.Get(ctx, client.ObjectKeyFromObject(theirs), theirs.DeepCopy()))
	forbidden("delete another namespace's claim", tenant.Delete(ctx, theirs.DeepCopy()))
	forbidden("label its namespace", tenant.Patch(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "team"}},
		client.RawPatch(types.MergePatchType, []byte(`{"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}}`))))
	forbidden("publish devices", tenant.Create(ctx, slice("tenant", driver)))
	forbidden("make a class", tenant.Create(ctx, &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "tenant"}}))
	forbidden("report GPUs", tenant.Patch(ctx, inventoryOf("node-a"), annotation()))
}

// TestGranularStatus checks the rights that Kubernetes 1.36 and later ask for besides
// RBAC's: the plugin has those for its own node's claims, and no others.
func TestGranularStatus(t *testing.T) {
	s := startServer(t, "feature-gates=DRAResourceClaimGranularStatusAuthorization=true")
	s.install(t)
	ctx := t.Context()
	claims := map[string]*resourceapi.ResourceClaim{"node-a": allocated(t, s, "claim-a", "node-a"), "node-b": allocated(t, s, "claim-b", "node-b")}
	patch := func(account, as, claimOf, status string) error {
		return s.as(t, account, as).Status().Patch(ctx, claims[claimOf].DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"status": `+status+`}`)))
	}
	devices := func(node string) string {
		return `{"devices": [{"driver": "gpu.nvidia.com", "pool": "` + node + `", "device": "gpu-0", "data": {"uuid": "GPU-1"}}]}`
	}
	const otherNode = `verb="[arbitrary-node:patch]" permission`
	const driverRight, bindingRight = "changing status.devices requires", "changing status.allocation or status.reservedFor requires"
	for name, c := range map[string]struct{ as, claimOf, status, want string }{
		"another node's claim":          {"node-a", "node-b", devices("node-b"), otherNode},
		"a token of no node":            {"", "node-a", devices("node-a"), otherNode},
		"another's reservation":         {"node-a", "node-a", `{"reservedFor": null}`, bindingRight},
		"taking its own claim's device": {"node-a", "node-a", `{"allocation": null, "reservedFor": null}`, bindingRight},
	} {
		t.Run(name, func(t *testing.T) {
			denied(t, c.want, func(context.Context) error { return patch("node", c.as, c.claimOf, c.status) })
		})
	}
	if err := patch("node", "node-a", "node-a", devices("node-a")); err != nil {
		t.Errorf("status.devices of its own node: %v", err)
	}
	// Each of the two is needed: without the new one the server refuses.
	role := &rbacv1.ClusterRole{}
	if err := s.admin.Get(ctx, types.NamespacedName{Name: "tessera-node"}, role); err != nil {
		t.Fatal(err)
	}
	for i, rule := range role.Rules {
		if rule.Resources[0] == "resourceclaims/driver" {
			role.Rules[i].Verbs = []string{"get"}
		}
	}
	if err := s.admin.Update(ctx, role); err != nil {
		t.Fatal(err)
	}
	denied(t, driverRight, func(context.Context) error { return patch("node", "node-a", "node-a", `{"devices": null}`) })
}
