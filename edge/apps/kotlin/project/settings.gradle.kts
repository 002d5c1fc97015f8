// Open this folder in Android Studio. edge/ is the model with its Kotlin API, app/ a chat that is yours to change.
pluginManagement {
    repositories {
        google()
        mavenCentral()
        gradlePluginPortal()
    }
}

dependencyResolutionManagement {
    repositories {
        google()
        mavenCentral()
    }
}

rootProject.name = "chat"
include(":app", ":edge")
