# One site on Google Cloud: engines in a network of their own that dial the gateways, and the token they join with. One state for
# each site.

terraform {
  required_version = ">= 1.11"
  required_providers {
    google = { source = "hashicorp/google", version = ">= 6.50, < 8.0" }
  }
  backend "gcs" {} # bucket and prefix come from -backend-config
}

variable "project" {
  description = "Project that holds the site."
  type        = string
}

provider "google" {
  project        = var.project
  region         = var.site.region
  default_labels = { project = "mico", site = var.site.name }
}

resource "google_secret_manager_secret" "site" {
  secret_id = "mico-site-${var.site.name}"
  replication {
    user_managed {
      replicas { location = var.site.region }
    }
  }
}

resource "google_secret_manager_secret_version" "site" {
  secret                 = google_secret_manager_secret.site.id
  secret_data_wo         = jsonencode(merge(var.secrets, { MICO_SITE_TOKEN = var.token }))
  secret_data_wo_version = var.token_version
}

module "machine" {
  source  = "../../modules/cloud-init"
  cloud   = "gcp"
  secrets = [google_secret_manager_secret.site.id]
  container = {
    image = var.image
    args  = ["site"]
    gpu   = true
    settings = merge({
      MICO_SITE_POOL     = var.site.name # every machine joins as the pool and its own host name
      MICO_SITE_CLOUD    = "gcp"
      MICO_SITE_REGION   = var.site.region
      MICO_SITE_GATEWAYS = join(",", var.gateways)
      MICO_SITE_TLS      = "true"
      MICO_SITE_MODEL    = var.model
      MICO_SITE_DRAIN_S  = "22" # ends by itself before the container is killed
      HF_HOME            = "/var/lib/mico/models"
    }, var.settings)
  }
}

module "pool" {
  source    = "../../modules/pool-gcp"
  pool      = merge(var.site, { role = "engine" })
  user_data = module.machine.user_data
  secrets   = [google_secret_manager_secret.site.secret_id]
}

output "pool" {
  description = "The site's pool."
  value       = module.pool.pool
}
